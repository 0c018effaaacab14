"""What a cache hands to attention: one layer's keys and values, and their scales where they are stored in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

# Keeps the scale of an all-zero vector from dividing by zero.
SMALLEST_SCALE = 1e-12
# Keeps the step of a group of equal numbers from dividing by zero.
SMALLEST_STEP = 1e-8
# The largest code of 4 bits.
LEVELS = 15
# Entries next to each other whose attention is noted as one.
SCORE_CHUNK = 8


@cache
def largest() -> dict[torch.dtype, float]:
    """The largest magnitude that each 8-bit storage holds."""
    return {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Packed(NamedTuple):
    """Numbers of 4 bits, `code * step + low`, of tokens in the order of their positions, from 0 on.

    A byte holds two codes, the first half of the head dim in the lower bits. key_codes: by groups of tokens, uint8
    `[max_batch, n_kv_head, n / group, ceil(head_dim / 2), group]`; value_codes: `[max_batch, n_kv_head, n,
    ceil(head_dim / 2)]`. Their lowest numbers and steps, bfloat16: key_grids by group and channel, `[2, max_batch,
    n_kv_head, n / group, head_dim]`; value_grids by as many channels as divide the head dim and by token, `[2,
    max_batch, n_kv_head, n_part, n]`. n_token: how many there are for queries, `<= n`. recent: the positions of tokens
    that count instead wherever both hold one, `[B', ring]` int64, position p in slot `p % ring` or nowhere.
    """

    key_codes: torch.Tensor
    value_codes: torch.Tensor
    key_grids: torch.Tensor
    value_grids: torch.Tensor
    n_token: int
    recent: torch.Tensor

    @property
    def group(self) -> int:
        return self.key_codes.shape[-1]

    def keys(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[B', n_kv_head, n, head_dim]`."""
        low, step = self.key_grids[:, rows, :, :, None]
        return split(self.key_codes[rows].mT, low.shape[-1]).to(dtype).mul_(step).add_(low).flatten(2, 3)

    def values(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `keys`."""
        low, step = self.value_grids[:, rows].mT[..., None]
        codes = split(self.value_codes[rows], self.key_grids.shape[-1]).to(dtype)
        return codes.unflatten(-1, (low.shape[-2], -1)).mul_(step).add_(low).flatten(-2)


def split(codes: torch.Tensor, size: int) -> torch.Tensor:
    """`[..., ceil(size / 2)]` bytes as `[..., size]` codes of 4 bits."""
    return torch.cat([codes & LEVELS, codes >> 4], dim=-1)[..., :size]


def joined(codes: torch.Tensor) -> torch.Tensor:
    """What `split` takes apart."""
    low, high = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).chunk(2, dim=-1)
    return low | high << 4


class KV(NamedTuple):
    """Keys and values `[B, C, n_kv_head, head_dim]`, the last stride 1.

    Entries of int8 or float8_e4m3fn mean `stored * scale`, a scale per token and head, `[B, C, n_kv_head]` float32;
    without scales they are the values. rows: `[B']` int64, the row of the entries that each row of queries attends to;
    None: row by row. packed: older tokens in 4 bits, where positions are those of all tokens; `unpacked` serves a
    backend that cannot read them. chunk_scores: a buffer `[max_batch, >= T, n_kv_head, >= C / SCORE_CHUNK]` float32
    that attention of a short block fills, in those rows, with the largest share that an entry of each chunk gets of
    each token's attention, averaged over the heads of its group; None: not needed.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    chunk_scores: torch.Tensor | None = None
    packed: Packed | None = None

    def unpacked(self, dtype: torch.dtype) -> KV:
        """Packed and recent tokens as entries of `dtype` in the order of their positions, with a row for each of the
        queries', so that `rows` is None."""
        assert self.packed is not None
        assert self.chunk_scores is None, "what is noted is a target's attention, whose entries are not packed"
        n_token, rows = self.packed.n_token, slice(None) if self.rows is None else self.rows
        recent = torch.stack(self._replace(packed=None).dequantized(dtype))
        _, n_row, _, n_head, head_dim = recent.shape
        # Slots of the ring that hold nothing go to a last one, which nobody reads.
        entries = recent.new_empty(2, n_row, n_head, n_token + 1, head_dim)
        for to, older in zip(entries, (self.packed.keys, self.packed.values), strict=True):
            to[:, :, :n_token] = older(rows, dtype)[:, :, :n_token]
        held = self.packed.recent
        at = torch.where((held >= 0) & (held < n_token), held, n_token)
        entries[:, torch.arange(n_row, device=held.device)[:, None], :, at] = recent.permute(1, 2, 0, 3, 4)
        return KV(*entries[..., :n_token, :].transpose(2, 3))

    def dequantized(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `dtype`, one row for each of the queries'; the entries themselves where they are that."""
        if self.packed is not None:
            return self.unpacked(dtype)[:2]
        if self.rows is not None:
            of_keys, of_values = (None if x is None else x[self.rows] for x in (self.key_scales, self.value_scales))
            return KV(self.keys[self.rows], self.values[self.rows], of_keys, of_values).dequantized(dtype)
        return dequantize(self.keys, self.key_scales, dtype), dequantize(self.values, self.value_scales, dtype)


def pack(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What a cache is given to store: keys and values `[..., n_kv_head, head_dim]` as `[..., 2, n_kv_head, head_dim]`.

    What is not finite becomes 0: a masked slot has weight 0, and 0 * NaN would spread a token that overflows to
    queries that must not see it. Such a token's own logits stay NaN.
    """
    return torch.nan_to_num(torch.stack((keys, values), dim=-3), nan=0.0, posinf=0.0, neginf=0.0)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x [..., head_dim]` in 8 bits: entries of `dtype` (a key of `largest()`), and scales `[...]` float32.

    Symmetric, one scale per vector: the largest magnitude of each becomes the largest that `dtype` holds.
    """
    x = x.float()
    scale = (x.abs().amax(dim=-1) / largest()[dtype]).clamp(min=SMALLEST_SCALE)
    scaled = x / scale[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


Store: TypeAlias = "Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], None]"


def store(
    entries: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor, new: torch.Tensor
) -> None:
    """Write `new [B, T, 2, n_kv_head, head_dim]` to `slots [B, T]` int64 of `rows [B, 1]` int64 of one layer's `entries
    [2, max_batch, n_kv_head, capacity, head_dim]`, in 8 bits where these have `scales`, `entries.shape[:-1]`."""
    if scales is None:
        entries[:, rows, :, slots] = new.to(entries.dtype)
    else:
        entries[:, rows, :, slots], scales[:, rows, :, slots] = quantize(new, entries.dtype)


def dequantize(stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The values `[..., head_dim]` in `dtype` of entries with scales `[...]`, or of entries that are the values."""
    if scale is None:
        return stored.to(dtype)
    return (stored.float() * scale[..., None]).to(dtype)


def stored_as(
    entries: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Entries of one cache as another one of `dtype` stores them: with scales if those have 8 bits."""
    if dtype not in largest():
        return dequantize(entries, scale, dtype), None
    if scale is None or entries.dtype != dtype:
        return quantize(dequantize(entries, scale, torch.float32), dtype)
    return entries, scale
