"""Drafters: what proposes the tokens that the target verifies. One protocol for all of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.runner import ModelRunner
from engine.sampling import greedy
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.errors import ConfigError
from models import Transformer


class Drafter(Protocol):
    """What `generate` asks of a drafter."""

    @property
    def gamma(self) -> int:
        """Tokens proposed per row and round."""
        ...

    @property
    def verification_cache(self) -> KVCache | WriteThroughKVCache:
        """The cache that the target verifies through."""
        ...

    def check(self, target_cache: KVCache, length: int) -> None:
        """Raise ConfigError unless this drafts for that cache, in rows of up to `length` tokens."""
        ...

    def admit(self, row: int, prompt_length: int) -> None:
        """A prompt of that length has just been prefilled in the target's row."""
        ...

    def propose(self, current: Tensor, lengths: Tensor, extent: int) -> Tensor:
        """Draft tokens `[B, gamma]` int64 that follow `current [B]`, which sits at position `lengths [B]`."""
        ...

    def rollback(self, lengths: Tensor) -> None:
        """The round left `lengths [B]` tokens of each row committed to the target's cache."""
        ...


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
        if target_cache is not self._target_cache:
            raise ConfigError(
                "the drafter was built on another runner",
                where="generate: drafter",
                seen="a SelfSpeculation over another target cache",
                required="the cache of the runner that generates",
                fix="build the drafter from the runner that is passed to generate()",
            )
        if self.cache.max_length is not None and length > self.cache.max_length:
            raise ConfigError(
                "prompt + new tokens + gamma + 1 exceeds the draft's KV cache",
                where="SelfSpeculation: cache",
                seen=f"{length} tokens",
                required=f"<= {self.cache.max_length}",
                fix="give the draft a longer cache, or a StreamingKVCache",
            )

    def admit(self, row: int, prompt_length: int) -> None:
        self.cache.fill_row(row, self._target_cache, prompt_length)

    def propose(self, current: Tensor, lengths: Tensor, extent: int) -> Tensor:
        token, drafts = current[:, None], [current.new_empty(current.shape[0], 0)]
        for i in range(self.gamma):
            logits = self._runner.step(token, lengths[:, None] + i, extent)
            token = greedy(logits)
            drafts.append(token)
        return torch.cat(drafts, dim=1)

    def rollback(self, lengths: Tensor) -> None:
        self.cache.rollback(lengths)


def check_gamma(gamma: int, window: int) -> None:
    """Raise ConfigError unless a verification block of gamma + 1 tokens fits the draft cache's window."""
    if gamma < 0:
        raise ConfigError(
            "gamma is negative",
            where="gamma (--gamma)",
            seen=gamma,
            required=">= 0",
            fix="use 0 for plain decoding, 3 for a usual speculation",
        )
    if gamma + 1 > window:
        raise ConfigError(
            "the draft cache's window is smaller than one verification block",
            where="gamma (--gamma) and the draft's budget (--streamingllm_budget)",
            seen=f"gamma {gamma}, window {window}",
            required="gamma + 1 <= window",
            fix=f"raise the budget by {gamma + 1 - window}, or lower gamma",
        )
