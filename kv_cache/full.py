"""FullKVCache: every token is kept, and its slot is its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kv_cache.base import Device, KVCache, KVShape
from kv_cache.policy import Policy


class FullKVCache(KVCache):
    """Keeps up to `max_len` tokens a row. Errors: ConfigError if `max_batch` or `max_len` is below 1."""

    in_order = True

    def __init__(
        self, config: KVShape, max_batch: int, max_len: int, device: Device = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, max_batch, max_len, device, dtype)
        self.max_length = max_len

    @property
    def max_block(self) -> int:
        return self.capacity

    def slots(self, positions: Tensor) -> Tensor:
        return positions

    def retained_positions(self, length: int) -> Tensor:
        return torch.arange(length)


@dataclass(frozen=True)
class Full(Policy):
    """All tokens."""

    name: ClassVar[str] = "full"

    def entries(self, length: int) -> int:
        return length

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return FullKVCache(config, max_batch, length, device, dtype)
