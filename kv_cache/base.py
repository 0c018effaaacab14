"""The cache protocol: each slot holds a token's key and value in every layer, and the token's position.

One rule decides what a query sees, whatever the policy: a query at position `p` sees a slot iff
`0 <= positions[slot] <= p`. A policy's subclass defines which slot a position takes (`slots`) and which
positions of a long context it keeps (`retained_positions`). A rollback is one masked fill.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.entries import KV, LARGEST, Store, dequantize, store, stored_as

EMPTY = -1
Device: TypeAlias = "str | torch.device"


class KVShape(Protocol):
    """The sizes of a model that its caches depend on (a `ModelConfig` has them)."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_kv_head(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class TrialShape(NamedTuple):
    """A small `KVShape`, for caches that kernels and policies are tried on."""

    n_layer: int = 1
    n_kv_head: int = 2
    n_head: int = 4
    head_dim: int = 64


@dataclass(frozen=True)
class Prefilled:
    """A prompt that a row holds.

    model: the model that computed it, compared by identity. logits: `[V]` after its last token; `[0]` on ranks that do
    not decide. bad_position: the first position whose numbers are not finite. answer: tokens in the row after the
    prompt.
    """

    model: object
    prompt: tuple[int, ...]
    logits: Tensor
    bad_position: int | None
    answer: tuple[int, ...] = ()


class KVCache(ABC):
    """Keys and values `[n_layer, 2, max_batch, n_kv_head, capacity, head_dim]` in `dtype` (None: float32).

    int8 and float8_e4m3fn have scales next to them, `[n_layer, 2, max_batch, n_kv_head, capacity]` float32.
    `positions [max_batch, capacity]` int64 holds the position of each slot's token, -1 where empty. Stored head-major,
    because a CPU reads one head's keys as one stream; attention backends get `[B, C, n_kv_head, head_dim]` views.
    """

    # True if slot i holds position i or nothing, with no gap below a query: visibility is then a length.
    in_order = False
    # True if a policy selects entries of a prompt longer than the cache by content, with `selected`.
    selects = False
    # The longest context that a row can follow; None: no bound.
    max_length: int | None = None
    # The number of a prompt's last queries that `selected` needs.
    n_queries = 0
    # True in a view if the block that runs over it takes its last slots, in order, in every row.
    block_ends_view = False
    # In a view over a tensor of rows: the index in `entries` of each row, `[B]` int64.
    rows: Tensor | None = None

    def __init__(
        self, config: KVShape, max_batch: int, capacity: int, device: Device = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or torch.float32
        require_at_least("max_batch", max_batch, 1)
        require_at_least("capacity", capacity, 1)
        self.capacity = capacity
        shape = (config.n_layer, 2, max_batch, config.n_kv_head, capacity, config.head_dim)
        # Zeros, not empty: `pack` too stores finite numbers only.
        self.entries = torch.zeros(shape, device=device, dtype=dtype)
        self.scales = torch.zeros(shape[:-1], device=device, dtype=torch.float32) if dtype in LARGEST else None
        self._positions = torch.full((max_batch, capacity), EMPTY, device=device)
        self._rows = torch.arange(max_batch, device=device)[:, None]
        # The prompt that a runner has filled each row with; resetting the row forgets it.
        self.prefilled: dict[int, Prefilled] = {}

    @property
    def max_batch(self) -> int:
        return len(self._rows)

    @property
    def positions(self) -> Tensor:
        """Positions of the slots' tokens, `[max_batch, capacity]`; a copy in a view over a tensor of rows."""
        return self._positions[self.stored_rows]

    @property
    def stored_rows(self) -> slice | Tensor:
        """The index that selects this view's rows in `entries`."""
        return slice(None) if self.rows is None else self.rows

    @property
    def row_indices(self) -> Tensor:
        """The index in `entries` of each row, `[B]` int64."""
        return self._rows[:, 0]

    @property
    def device(self) -> torch.device:
        return self.entries.device

    @property
    def keys(self) -> Tensor:
        """Keys as stored, `[n_layer, max_batch, n_kv_head, capacity, head_dim]`."""
        return self.entries[:, 0]

    @property
    def n_bytes(self) -> int:
        """Bytes of the entries and their scales."""
        return sum(x.nbytes for x in (self.entries, self.scales) if x is not None)

    @abstractmethod
    def slots(self, positions: Tensor) -> Tensor:
        """Return the slot of each position, int64 in the shape of `positions`."""

    @abstractmethod
    def retained_positions(self, length: int) -> Tensor:
        """Return the positions `[n]` int64, ascending, that the policy keeps of a context of `length` tokens."""

    @property
    @abstractmethod
    def max_block(self) -> int:
        """The most tokens that one forward may write into a row without overwriting its own entries."""

    @property
    def prefill_block(self) -> int:
        """The most tokens of a prompt that should run in one forward."""
        return self.max_block

    def begin(self, positions: Tensor) -> Tensor:
        """Claim slots for a forward over `positions [B, T]`, and return them, `[B, T]`."""
        slots = self.slots(positions)
        self._positions[self._rows, slots] = positions
        return slots

    def rotary_positions(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rotary positions of queries at `positions [B, T]`, and of the keys in all slots, `[B, C]`, or None
        if keys are stored already rotated. Called after `begin`."""
        return positions, None

    def write(self, layer: int, slots: Tensor, new: Tensor, store: Store = store) -> None:
        """Store one layer's `new [B, T, 2, n_kv_head, head_dim]` entries, made by `entries.pack`, in `slots [B, T]`.
        store: a kernel that does what `entries.store` does."""
        store(self.entries[layer], None if self.scales is None else self.scales[layer], self._rows, slots, new)

    def read(self, layer: int, queries: Tensor | None = None) -> KV:
        """Return views of one layer's entries. queries: the queries that will attend to them, `[B, T, n_head,
        head_dim]`, rotated if keys are."""
        keys, values = self.entries[layer].transpose(2, 3)
        key_scales, value_scales = (None, None) if self.scales is None else self.scales[layer].transpose(2, 3)
        return KV(keys, values, key_scales, value_scales, self.rows)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return one layer's entries `[2, B, n_kv_head, n, head_dim]` at `slots`, and their scales or None. slots: `[B,
        n_kv_head, n]`, or a shape that broadcasts to it."""
        heads = torch.arange(self.entries.shape[3], device=self.device)[:, None]
        at = slice(None), self.row_indices[:, None, None], heads, slots
        return self.entries[layer][at], None if self.scales is None else self.scales[layer][at]

    def rollback(self, lengths: Tensor) -> None:
        """Forget every token at a position >= `lengths [B]` int64."""
        positions = self.positions
        self._positions[self.stored_rows] = positions.masked_fill(positions >= lengths[:, None], EMPTY)

    def reset_row(self, row: int) -> None:
        """Forget everything in one row."""
        assert self.rows is None, "rows are filled and reset in the cache itself"
        self.prefilled.pop(row, None)
        self.positions[row] = EMPTY

    @property
    def by_layer(self) -> list[Tensor] | None:
        """The tensors `[n_layer, ...]` of which each layer writes and reads its own slice; None if it uses more."""
        is_plain = type(self).write is KVCache.write and type(self).read is KVCache.read
        return [x for x in (self.entries, self.scales) if x is not None] if is_plain else None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that hold a row's tokens."""
        return [x for x in (self.entries, self.scales, self.positions) if x is not None]

    def selected(self, kept: Tensor, prompt: PromptEntries) -> Tensor:
        """Return the positions whose entries go to the slots of `kept [n]`: `[n]`, or `[n_kv_head, n]` by head. Called
        in each layer for a prompt that is longer than the cache, if it `selects`."""
        return kept

    def filled(self, layer: int, row: int, text: PromptEntries, n_known: int) -> None:
        """Called after a row of a layer was filled with the tokens of `text` from `n_known` on."""
        return

    def fill_row(
        self,
        row: int,
        source: KVCache,
        length: int,
        layers: Sequence[int] | None = None,
        queries: Sequence[Tensor] | None = None,
        source_row: int | None = None,
        n_known: int = 0,
    ) -> None:
        """Fill a row with the entries that this policy keeps of a row of `source`, `length` tokens long.

        Args:
            layers: the source's layers that this cache has, in order; None: all.
            queries: of the last `n_queries` tokens in every layer of the source, `[n_head, n_queries, head_dim]`.
            source_row: the row of the source; None: the row of the same number.
            n_known: the first tokens are in place; only later ones are copied, and the selection stays.
        """
        selects = self.selects and length > self.capacity and not n_known
        assert not (selects and self.n_queries and queries is None), "the policy selects by a prompt's last queries"
        from_row = row if source_row is None else source_row
        from_view = source.view(slice(from_row, from_row + 1))
        kept = self.retained_positions(length)
        kept = kept[kept >= n_known].to(self.device)
        to_slots = self.slots(kept)
        if not n_known:
            self.reset_row(row)
        for to_layer, from_layer in enumerate(range(len(self.entries)) if layers is None else layers):
            last = None if queries is None else queries[from_layer]
            text = PromptEntries(source, from_row, from_layer, length, last)
            positions = self.selected(kept, text) if selects else kept
            self.put(to_layer, row, to_slots, *from_view.gather(from_layer, source.slots(positions)))
            self.filled(to_layer, row, text, n_known)
        self.positions[row, to_slots] = kept

    def put(self, layer: int, row: int, slots: Tensor, entries: Tensor, scales: Tensor | None) -> None:
        """Store entries that another cache gathered, `[2, 1, n_kv_head, n, head_dim]`, in `slots [n]` of a row."""
        entries, scales = stored_as(entries, scales, self.entries.dtype)
        self.entries[layer, :, row][:, :, slots] = entries[:, 0]
        if self.scales is not None and scales is not None:
            self.scales[layer, :, row][:, :, slots] = scales[:, 0]

    def view(
        self, rows: slice | Tensor = slice(None), extent: int | None = None, block_at_end: bool = False
    ) -> KVCache:
        """Return a view of this cache, narrowed to `rows` and to the slots that positions below `extent` can take.

        rows: a range, or `[B]` int64 in any order. With a tensor of rows, entries are not sliced: the backend indexes
        them. Such a view can only be narrowed by `extent`, and its rows cannot be filled or reset. block_at_end: the
        block that will run over the view takes the last positions below `extent`, in every row.
        """
        extent = self.capacity if extent is None else min(extent, self.capacity)
        narrowed = copy.copy(self)
        stored = rows if isinstance(rows, slice) else slice(None)
        assert self.rows is None or stored == rows == slice(None), "a view over a tensor of rows is narrowed by rows"
        narrowed.entries = self.entries[:, :, stored, :, :extent]
        if self.scales is not None:
            narrowed.scales = self.scales[:, :, stored, :, :extent]
        narrowed._positions = self._positions[stored, :extent]
        narrowed._rows = self._rows[: len(narrowed._positions)]
        if isinstance(rows, Tensor):
            narrowed.rows, narrowed._rows = rows.contiguous(), rows[:, None]
        narrowed.block_ends_view = block_at_end and self.in_order
        return narrowed


@dataclass(frozen=True)
class PromptEntries:
    """One layer's entries of a prompt in the order of their positions, read as they are needed, for policies that
    score them.

    cache, row: where the entries are, all of them. layer: the layer's index in that cache's model. length: the number
    of the prompt's tokens. last_queries: see `queries`. first: entries before that position are left out.
    """

    cache: KVCache
    row: int
    layer: int
    length: int
    last_queries: Tensor | None
    first: int = 0

    @property
    def n_layer(self) -> int:
        """The number of layers of the cache's model."""
        return len(self.cache.entries)

    @property
    def queries(self) -> Tensor:
        """Queries of the prompt's last `n_queries` tokens, `[n_head, n_queries, head_dim]` in the model's dtype,
        rotated."""
        if self.last_queries is None:
            raise LookupError("no queries are kept, unless the policy's class sets `n_queries` to how many it needs")
        return self.last_queries

    @cached_property
    def positions(self) -> Tensor:
        """The entries' positions, `[length]` int64."""
        return torch.arange(self.first, self.length, device=self.cache.device)

    @cached_property
    def keys(self) -> Tensor:
        """`[n_kv_head, length, head_dim]` float32, rotated by their positions."""
        return self._read(0)

    @cached_property
    def values(self) -> Tensor:
        """`[n_kv_head, length, head_dim]` float32."""
        return self._read(1)

    def _read(self, part: int) -> Tensor:
        at = self.layer, part, self.row, slice(None), self.cache.slots(self.positions)
        scales = None if self.cache.scales is None else self.cache.scales[at]
        return dequantize(self.cache.entries[at], scales, torch.float32)
