"""QuantizedKVCache: keeps every token, recent ones in `dtype` and all older ones in 4 bits (QuantSpec)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.errors import require_at_least
from common.launch import launch_on, triton_reads, works
from kv_cache.base import EMPTY, Device, KVCache, KVShape, TrialShape
from kv_cache.entries import KV, LEVELS, SMALLEST_STEP, Packed, Store, dequantize, joined, store
from kv_cache.full import Full, FullKVCache

# Tokens that are quantised together when a row is filled: their float32 copies take little memory.
FILLED_AT_ONCE = 512


class QuantizedKVCache(FullKVCache):
    """Keeps all tokens in 4 bits, in the order of their positions, and a ring of recent tokens in `dtype` (Tiwari et
    al., "QuantSpec", arXiv 2502.10424, section 4).

    The numbers of a group share their smallest number and a step, both in bfloat16. Keys are grouped along tokens, by
    channel; values along channels, by token. `group` tokens are quantised at once, when all of them lie `window` or
    more before a block that is written; until then they are in the ring (the paper has two buffers). `begin` finds that
    group in each row, `write` quantises it layer by layer. packing: what `kernel_for` returns. Errors: ConfigError if
    `group` is below 1, or `window` shorter.

    entries: those of the ring, `[n_layer, 2, max_batch, n_kv_head, window + 3 * group, head_dim]`.
    """

    # True: a CPU skips writes that change nothing. False while a round is captured, where the host cannot decide.
    asks_host = True

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        max_len: int,
        group: int = 16,
        window: int = 64,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        packing: ModuleType | None = None,
    ) -> None:
        require_at_least("quant_group", group, 1)
        require_at_least("quant_window", window, group)  # a group waits there until it is quantised
        # A group begins at most `window + 2 * group` tokens before the block that causes it to be quantised, which has
        # at most `group` tokens: none of the group is overwritten before.
        super().__init__(config, max_batch, window + 3 * group, device, dtype)
        self.ring, self.group, self.window = self.capacity, group, window
        self.capacity = self.max_length = max_len
        self._ring_positions, self._positions = self._positions, torch.full((max_batch, max_len), EMPTY, device=device)
        self._last_group = torch.full((max_batch,), EMPTY, device=device)
        n_group, along = -(-max_len // group), math.gcd(group, config.head_dim)
        layers, rows, n_slot = config.n_layer, (max_batch, config.n_kv_head), n_group * group
        codes = partial(torch.zeros, device=device, dtype=torch.uint8)
        grids = partial(torch.zeros, device=device, dtype=torch.bfloat16)
        # The tensors of `Packed` in each layer: codes and grids, of keys and of values.
        self.packed = [
            codes(layers, *rows, n_group, -(-config.head_dim // 2), group),
            codes(layers, *rows, n_slot, -(-config.head_dim // 2)),
            grids(layers, 2, *rows, n_group, config.head_dim),
            grids(layers, 2, *rows, config.head_dim // along, n_slot),
        ]
        self._packing, self._was_due = packing, self._last_group

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + sum(x.nbytes for x in self.packed)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, *self.packed, self._ring_positions, self._last_group]

    @property
    def max_block(self) -> int:
        return self.group

    def begin(self, positions: Tensor) -> Tensor:
        super().begin(positions)
        slots = positions % self.ring
        self._ring_positions[self._rows, slots] = positions
        # The last group that lies far enough back, and the last group that is in 4 bits.
        self._due = (positions[:, :1] - (self.window + self.group)) // self.group
        self._was_due, self._skips = self._last_group[self._rows], False
        self._last_group[self._rows] = self._due
        if self._packing is None:
            is_new = (self._due >= 0) & (self._due != self._was_due)
            self._due = self._due.clamp(min=0)
            tokens = self._due * self.group + torch.arange(self.group, device=self.device)
            # True for rows that have the group in the ring, and not yet in 4 bits.
            self._is_due = (is_new & (self._ring_positions[self._rows, tokens % self.ring] == tokens)).all(dim=1)
            self._skips = self.asks_host and self.device.type == "cpu" and not self._is_due.any()
        return slots

    def write(self, layer: int, slots: Tensor, new: Tensor, store: Store = store) -> None:
        """Write into the ring, then quantise the group that is due."""
        super().write(layer, slots, new, store)
        if not self._skips:
            self._quantize(layer, self, layer, self._rows, self._due, self._packing)

    def _quantize(
        self, layer: int, source: KVCache, from_layer: int, rows: Tensor, groups: Tensor, packing: Any
    ) -> None:
        """Quantise `groups [B, n]` of `rows [B, 1]` of a layer of `source`; if that is this cache, only those that are
        due. packing: the module that `kernel_for` returned."""
        entries, scales = source.entries[from_layer], None if source.scales is None else source.scales[from_layer]
        packed = [x[layer] for x in self.packed]
        if packing is not None:
            where = groups.flatten(), rows.expand_as(groups).flatten().contiguous()
            checks = (self._was_due, self._ring_positions) if source is self else None
            launch_on(self.device, [packing.plan_packing(entries, scales, packed, *where, checks)])
            return
        slots = (groups[..., None] * self.group + torch.arange(self.group, device=self.device)).flatten(1)
        stored_at = slots % entries.shape[3]
        scales = None if scales is None else scales[:, rows, :, stored_at]
        tokens = dequantize(entries[:, rows, :, stored_at], scales, torch.float32).unflatten(1, (-1, self.group))
        keys, values = tokens.unbind(3)
        n_part, every = packed[3].shape[-2], slice(None)
        key_codes, key_grid = quantize4(keys, 2)
        value_codes, value_grid = quantize4(values.unflatten(-1, (n_part, -1)), -1)
        updates: tuple[tuple[Any, Tensor], ...] = (
            ((rows, every, groups), joined(key_codes).permute(0, 1, 3, 4, 2)),
            ((rows, every, slots), joined(value_codes.flatten(-2)).flatten(1, 2)),
            ((every, rows, every, groups), torch.stack(key_grid, dim=3)[:, :, 0]),
            ((every, rows, every, every, slots), torch.stack(value_grid, dim=3)[..., 0].flatten(1, 2)),
        )
        for stored, (at, new) in zip(packed, updates, strict=True):
            if source is self:
                new = torch.where(self._is_due.view(-1, *[1] * (new.ndim - 1)), new, stored[at])
            stored[at] = new

    def read(self, layer: int, queries: Tensor | None = None) -> KV:
        n_token = self._positions.shape[1]
        n_group = -(-n_token // self.group)
        n_slot = n_group * self.group
        key_codes, value_codes, key_grids, value_grids = (x[layer] for x in self.packed)
        codes = key_codes[:, :, :n_group], value_codes[:, :, :n_slot]
        grids = key_grids[..., :n_group, :], value_grids[..., :n_slot]
        recent = self._ring_positions if self.rows is None else self._ring_positions[self.rows]
        return super().read(layer)._replace(packed=Packed(*codes, *grids, n_token, recent))

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
        """Fill a row from a source whose slots are in the order of positions: whole groups in 4 bits, and the last
        tokens in the ring. For the arguments, see `KVCache.fill_row`."""
        from_row = row if source_row is None else source_row
        if not n_known:
            self.reset_row(row)
        n_group = max(0, (length - self.window) // self.group)
        # Known tokens are in 4 bits, except those that the last block left in the ring.
        first = max(0, (n_known - self.window) // self.group - 1)
        kept = torch.arange(first * self.group, length, device=self.device)
        recent, groups = kept[-self.ring :], torch.arange(first, n_group, device=self.device)[None]
        to_view, from_view = self.view(slice(row, row + 1)), source.view(slice(from_row, from_row + 1))
        packing = self._packing if source.device.type == "cpu" or triton_reads(source.entries) else None
        at_once = max(1, n_group) if packing else -(-FILLED_AT_ONCE // self.group)
        for to_layer, from_layer in enumerate(range(len(self.entries)) if layers is None else layers):
            for some in groups.split(at_once, dim=1) if n_group > first else ():
                to_view._quantize(to_layer, from_view, from_layer, torch.zeros_like(some[:, :1]), some, packing)
            self.put(to_layer, row, recent % self.ring, *from_view.gather(from_layer, recent))
        self._positions[row, kept] = kept
        self._ring_positions[row, recent % self.ring] = recent
        self._last_group[row] = n_group - 1

    def view(
        self, rows: slice | Tensor = slice(None), extent: int | None = None, block_at_end: bool = False
    ) -> QuantizedKVCache:
        narrowed = super().view(rows, extent, block_at_end)
        assert isinstance(narrowed, QuantizedKVCache)
        stored = rows if isinstance(rows, slice) else slice(None)
        # The extent narrows positions and codes; the ring stays whole.
        narrowed.entries = self.entries[:, :, stored]
        narrowed.scales = None if self.scales is None else self.scales[:, :, stored]
        codes, grids = self.packed[:2], self.packed[2:]
        narrowed.packed = [*(x[:, stored] for x in codes), *(x[:, :, stored] for x in grids)]
        narrowed._ring_positions, narrowed._last_group = self._ring_positions[stored], self._last_group[stored]
        return narrowed


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> ModuleType | None:
    """Return the module of the Triton kernel that packs entries of a head in a dtype; None if it cannot run on the
    device, or, with a note, if it packs otherwise than PyTorch."""
    if not triton_reads(torch.empty(0, head_dim, dtype=dtype, device=device)):
        return None
    from kv_cache import triton_packing

    trial = partial(difference, triton_packing, device, dtype, head_dim, group)
    return triton_packing if works(trial, "packs 4 bits") else None


def difference(packing: ModuleType, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """Return which parts of a row that a kernel packs differ from PyTorch's; None if all are equal."""
    shape, n_token, found = TrialShape(head_dim=head_dim), 6 * group + 3, []
    source = FullKVCache(shape, 1, n_token, device, dtype)
    new = torch.randn(1, n_token, 2, shape.n_kv_head, head_dim, generator=torch.Generator().manual_seed(0))
    source.write(0, torch.arange(n_token, device=device)[None], new.to(device))
    for kernel in (None, packing):
        cache = QuantizedKVCache(shape, 1, n_token, group, group, device, dtype, kernel)
        cache.fill_row(0, source, n_token - 1)
        found.append(cache.packed)
    equal = [torch.equal(theirs, ours) for theirs, ours in zip(*found, strict=True)]
    return None if all(equal) else f"equal codes of keys and values, and grids of both: {equal}"


def quantize4(x: Tensor, dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return codes of 0 to 15 of `x`, uint8, and each group's smallest number and step, bfloat16. Groups lie along
    `dim`, whose size is 1 in their numbers and steps."""
    low = x.amin(dim, keepdim=True).bfloat16()
    step = ((x.amax(dim, keepdim=True) - low) / LEVELS).clamp(min=SMALLEST_STEP).bfloat16()
    return ((x - low) / step).round().clamp(0, LEVELS).to(torch.uint8), (low, step)


@dataclass(frozen=True)
class Quantized(Full):
    """All tokens, older ones in 4 bits."""

    name: ClassVar[str] = "quantized"
    quant_group: int = 16
    """numbers that share a scale: tokens of a key's channel, channels of a value; a CPU reads groups of a multiple of
    16 directly, and unpacks others first"""
    quant_window: int = 64
    """the least number of recent tokens that are not quantised"""

    @property
    def room(self) -> int:
        return self.quant_group

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        packing = kernel_for(torch.device(device), dtype, config.head_dim, self.quant_group)
        return QuantizedKVCache(config, max_batch, length, self.quant_group, self.quant_window, device, dtype, packing)
