"""The drafter protocol, and the checks that drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.modes import Drafts, VerificationRound
from engine.runner import ModelRunner
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.errors import ConfigError


class Drafter(Protocol):
    """What `generate` asks of a drafter."""

    @property
    def gamma(self) -> int:
        """The most tokens proposed per row and round."""
        ...

    @property
    def verification_cache(self) -> KVCache | WriteThroughKVCache:
        """The cache that the target verifies through."""
        ...

    def check(self, target_cache: KVCache, length: int) -> None:
        """Raise ConfigError unless this drafts for that cache, in rows of up to `length` tokens."""
        ...

    def admit(self, row: int, request: int, prompt: Sequence[int]) -> None:
        """The prompt of the request with that id has just been prefilled in the target's row."""
        ...

    def propose(self, current: Tensor, lengths: Tensor, extent: int, verification: VerificationRound) -> Drafts:
        """Drafts to follow `current [B]`, which sits at position `lengths [B]`: `gamma` columns, of which a
        row means as many as its draft length says.

        A draft model's tokens are those that `verification.draw` gives for its logits.
        """
        ...

    def rollback(self, lengths: Tensor) -> None:
        """The round left `lengths [B]` tokens of each row committed to the target's cache."""
        ...


class TextDrafter:
    """What drafters without a model share: no cache of their own, so nothing to write through or roll back."""

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        require_gamma(gamma)
        self.gamma = gamma
        self._target_cache = runner.cache

    @property
    def verification_cache(self) -> KVCache:
        return self._target_cache

    def check(self, target_cache: KVCache, length: int) -> None:
        check_target(type(self).__name__, self._target_cache, target_cache)

    def rollback(self, lengths: Tensor) -> None:
        pass


def check_target(drafter: str, own: KVCache, given: KVCache) -> None:
    """Raise ConfigError unless the cache that generates is the one that the drafter was built over."""
    if given is not own:
        raise ConfigError(
            "the drafter was built on another runner",
            where="generate: drafter",
            seen=f"{drafter} over another target's cache",
            required="the cache of the runner that generates",
            fix="build the drafter from the runner that is passed to generate()",
        )


def require_gamma(gamma: int) -> None:
    """Raise ConfigError if gamma is negative."""
    if gamma < 0:
        raise ConfigError(
            "gamma is negative",
            where="gamma (--gamma)",
            seen=gamma,
            required=">= 0",
            fix="use 0 for plain decoding, 3 for a usual speculation",
        )


def check_gamma(gamma: int, window: int) -> None:
    """Raise ConfigError unless a verification block of gamma + 1 tokens fits the draft cache's window."""
    require_gamma(gamma)
    if gamma + 1 > window:
        raise ConfigError(
            "the draft cache's window is smaller than one verification block",
            where="gamma (--gamma) and the draft's budget (--streamingllm_budget)",
            seen=f"gamma {gamma}, window {window}",
            required="gamma + 1 <= window",
            fix=f"raise the budget by {gamma + 1 - window}, or lower gamma",
        )
