"""Views that a forward uses in place of a cache: read-only, writing to two caches, or without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from kv_cache.base import KVCache
from kv_cache.entries import KV, Store, store


class ReadOnlyKVCache:
    """A view of a cache that already holds the forward's tokens: they run again, and nothing is written. `queries`:
    the forward's queries of each layer in order, `[B, T, n_head, head_dim]`."""

    by_layer = None

    def __init__(self, cache: KVCache) -> None:
        self.in_order, self.block_ends_view, self.rows = cache.in_order, cache.block_ends_view, cache.rows
        self.positions, self.rotary_positions, self._read = cache.positions, cache.rotary_positions, cache.read
        self.queries: list[torch.Tensor] = []

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def write(self, layer: int, slots: None, new: torch.Tensor, store: Store = store) -> None:
        return None

    def read(self, layer: int, queries: torch.Tensor) -> KV:
        self.queries.append(queries)
        return self._read(layer)


class NoCache:
    """Makes the forward's tokens the only ones that it sees; gradients flow through them."""

    in_order, block_ends_view, rows, by_layer = True, True, None, None

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        return positions, None

    def write(self, layer: int, slots: None, new: torch.Tensor, store: Store = store) -> None:
        self._new = new

    def read(self, layer: int, queries: torch.Tensor) -> KV:
        keys, values = self._new.unbind(2)
        return KV(keys, values)


@dataclass(frozen=True)
class SeenSlots:
    """The slots of a cache for a block that is not causal, or sees only some of them: backends go by `positions`
    `[B, C]`, -1 for a slot that is hidden, and not by lengths."""

    positions: torch.Tensor
    rows: torch.Tensor | None
    in_order: ClassVar[bool] = False
    block_ends_view: ClassVar[bool] = False


class WriteThroughKVCache:
    """Reads from `target`, a cache or a write-through view; writes to it, and to `draft` in its `layers` (None: all).

    Verifying through it replaces a self-draft's approximate entries by those that the target computes for the same
    tokens, for one small extra write per layer.
    """

    def __init__(
        self, target: KVCache | WriteThroughKVCache, draft: KVCache, layers: Sequence[int] | None = None
    ) -> None:
        self.target, self.draft, self.layers = target, draft, layers
        self.in_order: bool = target.in_order
        self.block_ends_view: bool = target.block_ends_view
        self.rows: torch.Tensor | None = target.rows
        stored = range(len(draft.entries))
        self._draft_layer = dict(zip(layers or stored, stored, strict=True))

    @property
    def positions(self) -> torch.Tensor:
        return self.target.positions

    @property
    def by_layer(self) -> list[torch.Tensor] | None:
        """See `KVCache.by_layer`."""
        read, written = self.target.by_layer, self.draft.by_layer
        is_plain = type(self).write is WriteThroughKVCache.write and self.layers is None
        return [*read, *written] if is_plain and read is not None and written is not None else None

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.target.rotary_positions(positions)

    def begin(self, positions: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self.target.begin(positions), self.draft.begin(positions)

    def write(self, layer: int, slots: tuple[Any, torch.Tensor], new: torch.Tensor, store: Store = store) -> None:
        self.target.write(layer, slots[0], new, store)
        if layer in self._draft_layer:
            self.draft.write(self._draft_layer[layer], slots[1], new, store)

    def read(self, layer: int, queries: torch.Tensor | None = None) -> KV:
        return self.target.read(layer, queries)

    def view(self, rows: slice | torch.Tensor = slice(None), extent: int | None = None) -> WriteThroughKVCache:
        return WriteThroughKVCache(self.target.view(rows, extent), self.draft.view(rows, extent), self.layers)


# What a forward runs over: it claims slots once, then writes and reads in every layer.
Slots: TypeAlias = KVCache | ReadOnlyKVCache | WriteThroughKVCache | NoCache
