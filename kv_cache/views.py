"""What a forward takes in place of a cache: one that holds its tokens already, two that it writes to, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from kv_cache.base import Device, KVCache
from kv_cache.entries import KV, Store, store


class ReadOnlyKVCache:
    """Over a cache that holds the forward's tokens: they are run again, and stored entries keep their bits. `queries`:
    those of each layer, `[B, T, n_head, head_dim]` in order."""

    def __init__(self, cache: KVCache) -> None:
        self.in_order, self.block_ends_view, self.rows = cache.in_order, cache.block_ends_view, cache.rows
        self.positions = cache.positions
        self.rotary_positions, self._read = cache.rotary_positions, cache.read
        self.queries: list[torch.Tensor] = []

    def begin(self, positions: torch.Tensor) -> None:
        return None

    def write(self, layer: int, slots: None, new: torch.Tensor, store: Store = store) -> None:
        return None

    def read(self, layer: int, queries: torch.Tensor) -> KV:
        self.queries.append(queries)
        return self._read(layer)


class VerificationScores:
    """What a cache chooses its entries by, of the last block that was verified in each row, in tensors that stay where
    they are; a shorter block fills the first tokens.

    starts: the position of its first token, `[max_batch]` int64, beyond any length where there was none. noted: its
    queries, `[n_layer, max_batch, n_token, n_head, head_dim]`, or with `as_shares` what `KV.noted` takes of each layer,
    `[n_layer, max_batch, n_token, n_kv_head, capacity / SCORE_CHUNK]`.
    """

    def __init__(self, shape: Sequence[int], device: Device, dtype: torch.dtype, as_shares: bool) -> None:
        self.starts = torch.empty(shape[1], device=device, dtype=torch.int64)
        self.noted, self._as_shares = torch.empty(*shape, device=device, dtype=dtype), as_shares
        self.forget()

    def forget(self, row: int | slice = slice(None)) -> None:
        self.starts[row], self.noted[:, row] = torch.iinfo(torch.int64).max, 0

    @property
    def n_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.starts, self.noted))

    def see(self, layer: int, rows: torch.Tensor, queries: torch.Tensor, kv: KV) -> KV:
        """What a layer of those rows reads with `queries [B, T, n_head, head_dim]`, with which it is observed."""
        if self._as_shares:
            return kv._replace(chunk_scores=self.noted[layer])
        self.noted[layer][rows, : queries.shape[1]] = queries
        return kv


class NoCache:
    """No cache: the forward's own tokens are all that it sees, and gradients flow through them."""

    in_order, block_ends_view, rows = True, True, None

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


class WriteThroughKVCache:
    """Reads from `target`, a cache or another of these; writes to it and, of the `layers` that it has (None: all), to
    `draft`, whose attention is `observed`.

    Verifying through it replaces the approximate KV that a self-drafting model left behind by what
    the target has just computed for the same tokens, at the cost of one small extra write a layer.
    """

    in_order: bool
    block_ends_view: bool
    rows: torch.Tensor | None

    def __init__(
        self,
        target: KVCache | WriteThroughKVCache,
        draft: KVCache,
        layers: Sequence[int] | None = None,
        observed: VerificationScores | None = None,
    ) -> None:
        self.target, self.draft, self.layers, self.observed = target, draft, layers, observed
        self.in_order, self.block_ends_view, self.rows = target.in_order, target.block_ends_view, target.rows
        own = range(len(draft.entries))
        self._draft_layer = dict(zip(layers or own, own, strict=True))

    @property
    def positions(self) -> torch.Tensor:
        return self.target.positions

    @property
    def is_observed(self) -> bool:
        inner = isinstance(self.target, WriteThroughKVCache) and self.target.is_observed
        return inner or self.observed is not None

    def rotary_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.target.rotary_positions(positions)

    def begin(self, positions: torch.Tensor) -> tuple[Any, torch.Tensor]:
        if self.observed is not None:
            self.observed.starts[self.draft.row_indices] = positions[:, 0]
        return self.target.begin(positions), self.draft.begin(positions)

    def write(self, layer: int, slots: tuple[Any, torch.Tensor], new: torch.Tensor, store: Store = store) -> None:
        self.target.write(layer, slots[0], new, store)
        if layer in self._draft_layer:
            self.draft.write(self._draft_layer[layer], slots[1], new, store)

    def read(self, layer: int, queries: torch.Tensor | None = None) -> KV:
        kv = self.target.read(layer, queries)
        if self.observed is None or queries is None or layer not in self._draft_layer:
            return kv
        return self.observed.see(self._draft_layer[layer], self.draft.row_indices, queries, kv)

    def view(self, rows: slice | torch.Tensor = slice(None), extent: int | None = None) -> WriteThroughKVCache:
        views = self.target.view(rows, extent), self.draft.view(rows, extent)
        return WriteThroughKVCache(*views, self.layers, self.observed)


# What a forward claims slots in once, then writes and reads in every layer.
Slots: TypeAlias = KVCache | ReadOnlyKVCache | WriteThroughKVCache | NoCache
