"""SelfSpeculation: the target drafts for itself over a second, budgeted cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.drafters.base import check_gamma, check_target
from engine.modes import Drafts, VerificationRound
from engine.runner import ModelRunner
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.errors import ConfigError
from models import Transformer


class SelfSpeculation:
    """The target drafts for itself over a second, budgeted cache (MagicDec, arXiv 2408.11049).

    That cache is never prefilled: it is filled from the target's own KV when a row is admitted, and
    written through by every verification, so only tokens of the current round are ever approximate.
    `model` may be a cheaper rendering of the same weights (another dtype); the target's is the default.
    Errors: ConfigError if gamma is negative or a verification block does not fit the cache's window.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache, gamma: int, model: Transformer | None = None) -> None:
        check_gamma(gamma, cache.max_block)
        if cache.max_batch != runner.cache.max_batch:
            raise ConfigError(
                "the draft cache has another number of rows than the target's",
                where="SelfSpeculation: cache.max_batch",
                seen=cache.max_batch,
                required=runner.cache.max_batch,
                fix="build both caches with the same max_batch",
            )
        self.gamma = gamma
        self.cache = cache
        self._target_cache = runner.cache
        self._runner = ModelRunner(model or runner.model, cache)
        self._write_through = WriteThroughKVCache(runner.cache, cache)

    @property
    def verification_cache(self) -> WriteThroughKVCache:
        return self._write_through

    def check(self, target_cache: KVCache, length: int) -> None:
        check_target("SelfSpeculation", self._target_cache, target_cache)
        if self.cache.max_length is not None and length > self.cache.max_length:
            raise ConfigError(
                "prompt + new tokens + gamma + 1 exceeds the draft's KV cache",
                where="SelfSpeculation: cache",
                seen=f"{length} tokens",
                required=f"<= {self.cache.max_length}",
                fix="give the draft a longer cache, or a StreamingKVCache",
            )

    def admit(self, row: int, request: int, prompt: Sequence[int]) -> None:
        self.cache.fill_row(row, self._target_cache, len(prompt))

    def propose(self, current: Tensor, lengths: Tensor, extent: int, verification: VerificationRound) -> Drafts:
        token, tokens, laws = current, [current.new_empty(len(current), 0)], []
        for i in range(self.gamma):
            logits = self._runner.step(token[:, None], lengths[:, None] + i, extent)
            token, law = verification.draw(logits[:, 0], i)
            tokens.append(token[:, None])
            if law is not None:
                laws.append(law)
        return Drafts(torch.cat(tokens, dim=1), torch.stack(laws, dim=1) if laws else None)

    def rollback(self, lengths: Tensor) -> None:
        self.cache.rollback(lengths)
