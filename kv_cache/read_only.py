"""ReadOnlyKVCache: tokens that a cache holds already are run over it again, and nothing is stored."""

from __future__ import annotations

import torch

from kv_cache.base import KVCache
from kv_cache.entries import KV


class ReadOnlyKVCache:
    """What a forward needs of a cache, over one that holds the forward's tokens: stored entries keep their bits."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.positions = cache.positions
        self.in_order = cache.in_order
        self.block_ends_view = cache.block_ends_view

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._cache.rotary_positions(positions)

    def write(self, layer: int, slots: None, new: torch.Tensor) -> None:
        return None

    def read(self, layer: int) -> KV:
        return self._cache.read(layer)
