"""FullKVCache: every token is kept, and its slot is its position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_cache.base import KVCache, KVShape

if TYPE_CHECKING:
    from torch import Tensor


class FullKVCache(KVCache):
    """A cache of `max_len` tokens a row. Errors: ConfigError if `max_batch` or `max_len` is below 1."""

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        max_len: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, max_batch, max_len, device, dtype)

    in_order = True

    @property
    def max_block(self) -> int:
        return self.capacity

    @property
    def max_length(self) -> int:
        return self.capacity

    def slots(self, positions: Tensor) -> Tensor:
        return positions

    def retained_positions(self, length: int) -> Tensor:
        return torch.arange(length)
