"""What a forward takes in place of a cache: one that holds its tokens already, two that it writes to, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from kv_cache.base import KVCache
from kv_cache.entries import KV


class ReadOnlyKVCache:
    """Over a cache that holds the forward's tokens: they are run again, and stored entries keep their bits."""

    def __init__(self, cache: KVCache) -> None:
        self.in_order, self.block_ends_view, self.rows = cache.in_order, cache.block_ends_view, cache.rows
        self.positions = cache.positions
        self.rotary_positions, self.read = cache.rotary_positions, cache.read

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def write(self, layer: int, slots: None, new: torch.Tensor) -> None:
        return None


class BlockAlone:
    """No cache: the forward's own tokens are all that it sees, and gradients flow through them."""

    in_order, block_ends_view, rows = True, True, None

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        return positions, None

    def write(self, layer: int, slots: None, new: torch.Tensor) -> None:
        self._new = new

    def read(self, layer: int) -> KV:
        return KV(*self._new.unbind(2))


class WriteThroughKVCache:
    """Reads from `target`; writes to `target` and, of the `layers` that it has, to `draft` (None: all of them).

    Verifying through it replaces the approximate KV that a self-drafting model left behind by what
    the target has just computed for the same tokens, at the cost of one small extra write a layer.
    """

    def __init__(self, target: KVCache, draft: KVCache, layers: Sequence[int] | None = None) -> None:
        self.target, self.draft, self.layers = target, draft, layers
        self.in_order, self.block_ends_view, self.rows = target.in_order, target.block_ends_view, target.rows
        self.rotary_positions, self.read = target.rotary_positions, target.read
        own = range(len(draft.entries))
        self._draft_layer = dict(zip(layers or own, own, strict=True))

    @property
    def positions(self) -> torch.Tensor:
        return self.target.positions

    def begin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.target.begin(positions), self.draft.begin(positions)

    def write(self, layer: int, slots: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        self.target.write(layer, slots[0], new)
        if layer in self._draft_layer:
            self.draft.write(self._draft_layer[layer], slots[1], new)

    def view(self, rows: slice | torch.Tensor = slice(None), extent: int | None = None) -> WriteThroughKVCache:
        return WriteThroughKVCache(self.target.view(rows, extent), self.draft.view(rows, extent), self.layers)


# What a forward claims slots in once, then writes and reads in every layer.
Slots: TypeAlias = KVCache | ReadOnlyKVCache | WriteThroughKVCache | BlockAlone
