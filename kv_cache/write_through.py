"""WriteThroughKVCache: one forward that reads the target's cache and stores its KV in the draft's too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_cache.base import KVCache
from kv_cache.entries import KV


class WriteThroughKVCache:
    """Reads from `target`; writes to `target` and, of the `layers` that it has, to `draft` (None: all of them).

    Verifying through it replaces the approximate KV that a self-drafting model left behind by what
    the target has just computed for the same tokens, at the cost of one small extra write a layer.
    """

    def __init__(self, target: KVCache, draft: KVCache, layers: Sequence[int] | None = None) -> None:
        self.target, self.draft, self.layers = target, draft, layers
        self.positions, self.in_order, self.block_ends_view = target.positions, target.in_order, target.block_ends_view
        own = range(len(draft.entries))
        self._draft_layer = dict(zip(layers or own, own, strict=True))

    def begin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.target.begin(positions), self.draft.begin(positions)

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.target.rotary_positions(positions)

    def write(self, layer: int, slots: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        self.target.write(layer, slots[0], new)
        if layer in self._draft_layer:
            self.draft.write(self._draft_layer[layer], slots[1], new)

    def read(self, layer: int) -> KV:
        return self.target.read(layer)

    def view(self, rows: slice = slice(None), extent: int | None = None) -> WriteThroughKVCache:
        return WriteThroughKVCache(self.target.view(rows, extent), self.draft.view(rows, extent), self.layers)
