"""QuantizedKVCache: every token is kept, recent ones as they are and all before them in 4 bits (QuantSpec)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import ConfigError, flag
from kv_cache.base import EMPTY, Device, KVCache, KVShape
from kv_cache.entries import KV, dequantize, stored_as
from kv_cache.full import Full, FullKVCache

LEVELS = 15
# A group whose numbers are all the same must not divide by 0.
SMALLEST_STEP = 1e-8


class QuantizedKVCache(FullKVCache):
    """All tokens, in the order of their positions: 4 bits a number, but for a ring of recent ones in `dtype` (Tiwari et
    al., "QuantSpec", arXiv 2502.10424, section 4).

    The numbers of a group share its smallest one and a step, both in bfloat16. Keys are grouped along tokens, each
    channel for itself; values along channels, each token for itself. `group` tokens are quantised at once, when all of
    them lie `window` or more before a block that is written; until then they are in the ring, as in the paper's two
    buffers. Reading unpacks one layer into a buffer that all layers share. The codes are a copy of their own, whatever
    the target's cache is stored in. Errors: ConfigError if `group` is below 1, or `window` shorter.

    entries: of the ring, `[n_layer, 2, max_batch, n_kv_head, window + 3 * group, head_dim]`.
    """

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        max_len: int,
        group: int = 16,
        window: int = 64,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 1 <= group <= window:
            what = "a group of tokens does not fit the window that is not quantised"
            where, seen = f"{flag('quant_group')} and {flag('quant_window')}", f"group {group}, window {window}"
            fix = f"raise {flag('quant_window')} or lower {flag('quant_group')}"
            raise ConfigError(what, where, seen, "1 <= group <= window", fix)
        # A group begins at most `window + 2 * group` tokens before the block that it is quantised at, which has `group`
        # tokens at most: none of them is written over before.
        super().__init__(config, max_batch, window + 3 * group, device, dtype)
        self.ring, self.capacity, self.group, self.window = self.capacity, max_len, group, window
        self._ring_positions, self._positions = self._positions, torch.full((max_batch, max_len), EMPTY, device=device)
        n_group, along = -(-max_len // group), math.gcd(group, config.head_dim)
        rows, n_slot = (config.n_layer, 2, max_batch, config.n_kv_head), n_group * group
        self._codes = torch.zeros(*rows, n_slot, -(-config.head_dim // 2), dtype=torch.uint8, device=device)
        # Of each group its smallest number and its step.
        grid = torch.zeros((), dtype=torch.bfloat16, device=device)
        self._key_grids = grid.new_zeros(*rows, n_group, config.head_dim)
        self._value_grids = grid.new_zeros(*rows, n_slot, config.head_dim // along)
        # Slots of the ring that hold nothing go to a last one, which nobody reads.
        unpacked = torch.bfloat16 if self.scales is not None else self.entries.dtype
        self._unpacked = torch.zeros(*rows[1:], n_slot + 1, config.head_dim, dtype=unpacked, device=device)

    @property
    def n_bytes(self) -> int:
        own = self._codes, self._key_grids, self._value_grids, self._unpacked
        return super().n_bytes + sum(x.numel() * x.element_size() for x in own)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self._codes, self._key_grids, self._value_grids, self._ring_positions]

    @property
    def max_block(self) -> int:
        return self.group

    def begin(self, positions: torch.Tensor) -> torch.Tensor:
        self._ring_positions[self._rows, positions % self.ring] = positions
        return super().begin(positions)

    def write(self, layer: int, slots: torch.Tensor, new: torch.Tensor) -> None:
        """As of every cache, into the ring; also quantises the last group that lies far enough back."""
        super().write(layer, slots % self.ring, new)
        group = ((slots[:, :1] - self.window) // self.group - 1).clamp(min=0)
        positions = group * self.group + torch.arange(self.group, device=self.device)
        at = positions % self.ring
        scales = None if self.scales is None else self.scales[layer][:, self._rows, :, at]
        tokens = dequantize(self.entries[layer][:, self._rows, :, at], scales, torch.float32)
        is_held = (self._ring_positions[self._rows, at] == positions).all(dim=1)
        self._quantize(layer, self._rows, group, tokens[:, None], is_held)

    def _quantize(
        self, layer: int, rows: torch.Tensor, groups: torch.Tensor, tokens: torch.Tensor, is_held: torch.Tensor
    ) -> None:
        """Store `tokens [B, n, group, 2, n_kv_head, head_dim]` as the `groups [B, n]` of `rows [B, 1]` that `is_held
        [B]` is true of."""
        keys, values = tokens.unbind(3)
        along = keys.shape[-1] // self._value_grids.shape[-1]
        key_codes, key_grid = quantize4(keys, 2)
        value_codes, value_grid = quantize4(values.unflatten(-1, (-1, along)), -1)
        codes = torch.stack([key_codes, value_codes.flatten(-2)], dim=3).flatten(1, 2)
        low, high = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).chunk(2, dim=-1)
        slots = (groups[..., None] * self.group + torch.arange(self.group, device=self.device)).flatten(1)
        for held, places, new in (
            (self._codes, slots, low | high << 4),
            (self._key_grids, groups, torch.stack(key_grid, dim=3)[:, :, 0]),
            (self._value_grids, slots, torch.stack(value_grid, dim=3)[..., 0].flatten(1, 2)),
        ):
            before = held[layer][:, rows, :, places]
            held[layer][:, rows, :, places] = torch.where(is_held[:, None, None, None, None], new, before)

    def read(self, layer: int, queries: torch.Tensor | None = None) -> KV:
        n_slot = self._positions.shape[1]
        n_group, last = -(-n_slot // self.group), self._unpacked.shape[3] - 1
        rows = slice(None) if self.rows is None else self.rows
        codes = self._codes[layer, :, rows, :, : n_group * self.group]
        x = torch.cat([codes & LEVELS, codes >> 4], dim=-1)[..., : self._unpacked.shape[-1]].to(self._unpacked.dtype)
        low, step = self._key_grids[layer, :, rows, :, :n_group, None]
        x[0].unflatten(2, (n_group, self.group)).mul_(step).add_(low)
        low, step = self._value_grids[layer, :, rows, :, : n_group * self.group, :, None]
        x[1].unflatten(3, (low.shape[-2], -1)).mul_(step).add_(low)
        self._unpacked[:, rows, :, : n_group * self.group] = x

        at = self._ring_positions[rows]
        at = torch.where((at >= 0) & (at < n_slot), at, last)
        scales = None if self.scales is None else self.scales[layer, :, rows]
        recent = dequantize(self.entries[layer, :, rows], scales, self._unpacked.dtype)
        self._unpacked[:, self._rows, :, at] = recent.permute(1, 3, 0, 2, 4)
        keys, values = self._unpacked[..., :n_slot, :].transpose(2, 3)
        return KV(keys, values, rows=self.rows)

    def fill_row(
        self,
        row: int,
        source: KVCache,
        length: int,
        layers: Sequence[int] | None = None,
        queries: Sequence[torch.Tensor] | None = None,
        source_row: int | None = None,
        known: int = 0,
    ) -> None:
        """As of every cache, but all anew; what lies behind the last whole group goes to the ring."""
        from_row = row if source_row is None else source_row
        self.reset_row(row)
        n_group = max(0, (length - self.window) // self.group)
        kept, own = torch.arange(length, device=self.device), torch.tensor([[row]], device=self.device)
        groups, is_held = torch.arange(n_group, device=self.device)[None], own[0] == row
        recent, slots = kept[-self.ring :], source.slots(kept)
        for to_layer, from_layer in enumerate(range(len(self.entries)) if layers is None else layers):
            scales = None if source.scales is None else source.scales[from_layer, :, from_row][:, :, slots]
            entries = source.entries[from_layer, :, from_row][:, :, slots]
            if n_group:
                tokens = dequantize(entries, scales, torch.float32)[:, :, : n_group * self.group].permute(2, 0, 1, 3)
                self._quantize(to_layer, own, groups, tokens.unflatten(0, (n_group, self.group))[None], is_held)
            scales = None if scales is None else scales[:, :, recent]
            entries, scales = stored_as(entries[:, :, recent], scales, self.entries.dtype)
            self.entries[to_layer, :, row][:, :, recent % self.ring] = entries
            if self.scales is not None and scales is not None:
                self.scales[to_layer, :, row][:, :, recent % self.ring] = scales
        self._positions[row, kept] = kept
        self._ring_positions[row, recent % self.ring] = recent

    def view(
        self, rows: slice | torch.Tensor = slice(None), extent: int | None = None, block_at_end: bool = False
    ) -> KVCache:
        narrowed = super().view(rows, extent, block_at_end)
        assert isinstance(narrowed, QuantizedKVCache)
        stored = rows if isinstance(rows, slice) else slice(None)
        # The slots of an extent are unpacked ones; the ring stays whole.
        narrowed.entries, narrowed._codes = self.entries[:, :, stored], self._codes[:, :, stored]
        narrowed.scales = None if self.scales is None else self.scales[:, :, stored]
        narrowed._key_grids, narrowed._value_grids = self._key_grids[:, :, stored], self._value_grids[:, :, stored]
        narrowed._unpacked, narrowed._ring_positions = self._unpacked[:, stored], self._ring_positions[stored]
        return narrowed


def quantize4(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """`x` in codes of 0 to 15, uint8, and of each group along `dim` its smallest number and its step, in bfloat16: of
    size 1 there."""
    low = x.amin(dim, keepdim=True).bfloat16()
    step = ((x.amax(dim, keepdim=True) - low) / LEVELS).clamp(min=SMALLEST_STEP).bfloat16()
    return ((x - low) / step).round().clamp(0, LEVELS).to(torch.uint8), (low, step)


@dataclass(frozen=True)
class Quantized(Full):
    """All tokens, in 4 bits but for recent ones."""

    name: ClassVar[str] = "quantized"
    has_own_storage: ClassVar[bool] = True
    quant_group: int = 16
    """numbers that share a scale: tokens of a key's channel, channels of a value"""
    quant_window: int = 64
    """recent tokens, at least, that are not quantised"""

    @property
    def room(self) -> int:
        return self.quant_group

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return QuantizedKVCache(config, max_batch, length, self.quant_group, self.quant_window, device, dtype)
