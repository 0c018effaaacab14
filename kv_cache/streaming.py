"""StreamingKVCache: attention sinks and a ring of recent tokens (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import Device, KVCache, KVShape
from kv_cache.policy import BudgetedPolicy
from kv_cache.ring import RingKVCache


class StreamingKVCache(RingKVCache):
    """Keeps the first `n_sink` tokens and the last `budget - n_sink`.

    Keys keep the rotation of their absolute position. With `rotate_on_read` they are stored un-rotated, and rotated at
    every read by their position *in the cache*, as in StreamingLLM (section 3.2): no rotary position then exceeds
    `budget`, so a model with a short trained context can follow a text of any length. Errors: see `RingKVCache`.
    """

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        budget: int,
        n_sink: int = 4,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        rotate_on_read: bool = False,
    ) -> None:
        require_at_least("n_sink", n_sink, 0)
        super().__init__(config, max_batch, budget, n_sink, device, dtype)
        self.rotate_on_read = rotate_on_read

    def rotary_positions(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.rotate_on_read:
            return positions, None
        in_window = self.positions >= self.n_fixed
        oldest = self.positions.masked_fill(~in_window, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)

        def in_cache(p: Tensor) -> Tensor:
            """Move the window next to the sinks; positions of empty slots are undefined."""
            return torch.where(p < self.n_fixed, p, p - oldest + self.n_fixed)

        return in_cache(positions), in_cache(self.positions)


@dataclass(frozen=True)
class Streaming(BudgetedPolicy):
    """Attention sinks and recent tokens."""

    name: ClassVar[str] = "streaming"
    n_sink: int = 4
    """attention sinks in the budget"""
    draft_positions: Literal["auto", "absolute", "cache"] = "auto"
    """rotary positions of a draft model or head: in the text (absolute), or in the cache (cache), where they never
    exceed the budget; auto: cache if the run is longer than the draft's trained context"""

    @property
    def reserved(self) -> int:
        return self.n_sink

    @property
    def room(self) -> int:
        return self.budget - self.n_sink

    @property
    def in_cache_positions(self) -> bool:
        return self.draft_positions == "cache"

    def for_context(self, trained: int, length: int) -> Streaming:
        if self.draft_positions != "auto":
            return self
        return replace(self, draft_positions="cache" if trained < length else "absolute")

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return StreamingKVCache(config, max_batch, self.budget, self.n_sink, device, dtype, self.in_cache_positions)
