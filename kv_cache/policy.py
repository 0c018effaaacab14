"""Policies: which entries a draft's cache keeps. Each is a frozen dataclass of options in its own file here."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from common.plug_ins import registered
from kv_cache.base import Device, KVCache, KVShape, TrialShape


@dataclass(frozen=True)
class Policy(ABC):
    """Options of a policy, whose fields are its flags."""

    KEY: ClassVar[str] = "name"
    name: ClassVar[str]
    # True if entries are selected by the target's verifications, so that only self-drafts can use the policy.
    of_self_drafts: ClassVar[bool] = False
    # True if its cache selects a prompt's entries by their content.
    selects: ClassVar[bool] = False

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return the number of KV entries of a row that grows to `length` tokens."""

    @abstractmethod
    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        """Return an empty cache for rows of up to `length` tokens."""

    @property
    def room(self) -> int:
        """The most tokens of a round that the cache can hold next to entries that always stay."""
        return sys.maxsize

    @property
    def automatic(self) -> bool:
        """True if the number of entries is chosen while decoding."""
        return False

    @property
    def in_cache_positions(self) -> bool:
        """True if keys are rotated as they are read, by their slot."""
        return False

    def check(self) -> None:
        """Raise ConfigError if its cache cannot be made. Not for `auto` entries."""
        self.new_cache(TrialShape(), 1, 1, "meta", torch.float32)

    def alternatives(self, prefix_len: int) -> list[Policy]:
        """Return the policies that `auto` chooses among for prompts of `prefix_len` tokens; this policy without it."""
        return [self]

    def within(self, n_entries: int, n_block: int) -> Policy:
        """Return this policy with at most `n_entries` entries a row, but room for a block of `n_block` tokens, if it
        has a fixed budget that is larger; else this policy."""
        return self

    def for_context(self, trained: int, length: int) -> Policy:
        """Return this policy for a draft model trained on `trained` positions, in rows of up to `length` tokens."""
        return self


@dataclass(frozen=True)
class BudgetedPolicy(Policy):
    """A policy whose cache holds a fixed number of entries a row, whatever the length of the text."""

    draft_budget: int | Literal["auto"] = 512
    """KV entries per row: sinks or selected entries, and recent ones; -1 is --draft_policy full; auto, for self-drafts:
    whichever of 64, 128, 256, 512 and 1024 pays best, chosen while decoding"""

    AUTO_BUDGETS: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 1024)

    @property
    def reserved(self) -> int:
        """The number of entries that always stay, such as sinks; `auto` tries budgets of more than twice that."""
        return 0

    @property
    def automatic(self) -> bool:
        return self.draft_budget == "auto"

    def within(self, n_entries: int, n_block: int) -> Policy:
        least = max(n_entries, self.reserved + n_block)
        return self if self.automatic or least >= self.budget else replace(self, draft_budget=least)

    @property
    def budget(self) -> int:
        """The budget, once `auto` is resolved."""
        assert not isinstance(self.draft_budget, str), "auto is resolved by alternatives()"
        return self.draft_budget

    def alternatives(self, prefix_len: int) -> list[Policy]:
        if not self.automatic:
            return [self]
        fitting = [budget for budget in self.AUTO_BUDGETS if 2 * self.reserved < budget < prefix_len]
        return [replace(self, draft_budget=budget) for budget in fitting or self.AUTO_BUDGETS[:1]]

    def entries(self, length: int) -> int:
        return self.budget


def described(value: object) -> str:
    """Return the type of a value, with the dtype and shape of a tensor or an array, or the length of a list."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__}, {value.dtype} {[*value.shape]}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, Sized) else "")


def policies() -> dict[str, type[Policy]]:
    """Return the policies of this folder by name."""
    return registered("kv_cache", Policy)
