"""ModelDrafter: drafts token by token from a model's logits, over a KV cache that follows the target's rows."""

from abc import abstractmethod

import torch
from torch import Tensor

from common.errors import ConfigError, require_at_least
from engine.batch import Batch
from engine.drafters.base import Drafter, check_gamma, require_same_cache
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import KVCache


class ModelDrafter(Drafter):
    """Base of drafters that run a model; `runner` may stand for a model on other ranks.

    target_cache: the cache of the target, for a model that continues the target's entries or states.
    follows_parts: True if `follow` takes a prompt in parts, and begins behind the tokens that the draft's row holds.
    """

    follows_parts: bool = False

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int, target_cache: KVCache | None = None) -> None:
        self.gamma, self._target_cache, self._runner = gamma, target_cache, runner
        self._cache = None if runner.cache is target_cache else runner.cache
        require_at_least("gamma", gamma, 0)
        if self._cache is not None:
            check_gamma(gamma, self._cache.max_block)

    @abstractmethod
    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """Return the logits `[B, V]` of the i-th draft, which follows `tokens [B]`; of a sharded model on the rank that
        decides. cache: the part of the draft's cache that a round can touch."""

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        cache = None if self._cache is None else batch.view_of(self._cache, gamma)
        tokens, distributions, bounds = [batch.current], [], self.schedule.bounds(batch, gamma)
        for i in range(gamma):
            logits = self.logits(batch, i, tokens[-1], cache)

            def draw(logits: Tensor = logits, i: int = i, bounds: Tensor = bounds) -> Tensor:
                token, distribution = verification.draw(logits, i)
                if distribution is not None:
                    distributions.append(distribution)
                return torch.stack([token, self.schedule.shorten(bounds, i, logits, token, batch)])

            token, bounds = self._runner.ranks.decided(draw, 2, len(batch.current))
            tokens.append(token)
            if self.schedule.n_columns(bounds, batch, gamma) <= i + 1:
                break
        drafted, probs = torch.stack(tokens, dim=1)[:, 1:], torch.stack(distributions, dim=1) if distributions else None
        return self.schedule.cut(Drafts(drafted, probs, bounds if self.schedule.varies else None), batch)

    def check(self, target: ModelRunner, length: int) -> None:
        if self._target_cache is not None:
            require_same_cache(self, self._target_cache, target)
        name, room = type(self).__name__, None if self._cache is None else self._cache.max_length
        if self._runner.max_batch != target.max_batch:
            what = "the draft cache has another number of rows than the target's"
            seen, fix = self._runner.max_batch, "build both caches with the same max_batch"
            raise ConfigError(what, f"{name}: cache.max_batch", seen, target.max_batch, fix)
        if room is not None and length > room:
            what, fix = "prompt + new tokens + gamma + 1 exceeds the draft's KV cache", "give the draft a longer cache"
            raise ConfigError(what, f"{name}: cache", f"{length} tokens", f"<= {room}", f"{fix}, or a StreamingKVCache")

    def rollback(self, batch: Batch) -> None:
        if self._cache is not None:
            batch.view_of(self._cache).rollback(batch.lengths)
        super().rollback(batch)
