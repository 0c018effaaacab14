"""RingKVCache: a fixed part, and a ring of recent tokens after it; what the fixed part holds is its policy's matter."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import Device, KVCache, KVShape


class RingKVCache(KVCache):
    """Keeps `n_fixed` entries that stay, and the last `budget - n_fixed` tokens; `budget` counts both.

    A position `p >= n_fixed` takes the ring slot `n_fixed + (p - n_fixed) mod window`, so writing it evicts exactly the
    token `window` before it; a block evicts before it attends. Tokens that a rejected draft evicted do not come back,
    which costs later drafts a little and no emitted token anything. Errors: ConfigError if the budget leaves no room
    for a window.
    """

    def __init__(
        self, config: KVShape, max_batch: int, budget: int, n_fixed: int, device: Device, dtype: torch.dtype | None
    ) -> None:
        require_at_least("draft_budget", budget, n_fixed + 1)
        super().__init__(config, max_batch, budget, device, dtype)
        self.n_fixed, self.window = n_fixed, budget - n_fixed

    @property
    def max_block(self) -> int:
        return self.window

    @property
    def prefill_block(self) -> int:
        # A block evicts before it attends; its first token still sees half the window.
        return max(1, self.window // 2)

    def slots(self, positions: Tensor) -> Tensor:
        ring = self.n_fixed + (positions - self.n_fixed) % self.window
        return torch.where(positions < self.n_fixed, positions, ring)

    def retained_positions(self, length: int) -> Tensor:
        fixed = torch.arange(min(self.n_fixed, length))
        recent = torch.arange(max(self.n_fixed, length - self.window), max(self.n_fixed, length))
        return torch.cat([fixed, recent])
