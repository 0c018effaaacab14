"""One layer's keys and values as attention reads them: in the model's dtype, in 8 bits, or in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# The largest magnitude that each dtype of 8 bits can store.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The least scale of a vector and the least step of a group in 4 bits, so that equal numbers divide by no zero.
SMALLEST_SCALE, SMALLEST_STEP = 1e-12, 1e-8
# The largest code of 4 bits.
LEVELS = 15
# Neighbouring entries that share one score (`KV.chunk_scores`).
SCORE_CHUNK = 8


class Packed(NamedTuple):
    """Entries in 4 bits, `code * step + low`, in the order of their positions, from 0 on.

    key_codes: uint8, by groups of tokens, `[max_batch, n_kv_head, n / group, ceil(head_dim / 2), group]`; a byte holds
        two codes, the first half of the head dim in the lower bits.
    value_codes: `[max_batch, n_kv_head, n, ceil(head_dim / 2)]`.
    key_grids: lowest numbers and steps, bfloat16, by group and channel, `[2, max_batch, n_kv_head, n / group,
        head_dim]`.
    value_grids: by parts of the head dim and token, `[2, max_batch, n_kv_head, n_part, n]`.
    n_token: the number of tokens that queries see, `<= n`.
    recent: `[B', ring]` int64, positions of tokens that `KV` has in full, which replace their 4-bit copies; position p
        is in slot `p % ring` or nowhere.
    """

    key_codes: Tensor
    value_codes: Tensor
    key_grids: Tensor
    value_grids: Tensor
    n_token: int
    recent: Tensor

    @property
    def group(self) -> int:
        return self.key_codes.shape[-1]

    def keys(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys `[B', n_kv_head, n, head_dim]`."""
        low, step = self.key_grids[:, rows, :, :, None]
        return split(self.key_codes[rows].mT, low.shape[-1]).to(dtype).mul_(step).add_(low).flatten(2, 3)

    def values(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values `[B', n_kv_head, n, head_dim]`."""
        low, step = self.value_grids[:, rows].mT[..., None]
        codes = split(self.value_codes[rows], self.key_grids.shape[-1]).to(dtype)
        return codes.unflatten(-1, (low.shape[-2], -1)).mul_(step).add_(low).flatten(-2)


def split(codes: Tensor, size: int) -> Tensor:
    """Split bytes `[..., ceil(size / 2)]` into codes of 4 bits, `[..., size]`."""
    return torch.cat([codes & LEVELS, codes >> 4], dim=-1)[..., :size]


def joined(codes: Tensor) -> Tensor:
    """Join codes of 4 bits, `[..., size]`, into bytes `[..., ceil(size / 2)]`: the inverse of `split`."""
    low, high = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).chunk(2, dim=-1)
    return low | high << 4


class KV(NamedTuple):
    """Keys and values `[B, C, n_kv_head, head_dim]`, the last stride 1.

    key_scales, value_scales: `[B, C, n_kv_head]` float32, a scale per token and head by which entries of int8 or
        float8_e4m3fn are multiplied; None for other entries.
    rows: `[B']` int64, the row of the entries that each row of queries attends to; None: the row of the same number.
    chunk_scores: a buffer `[max_batch, >= T, n_kv_head, >= C / SCORE_CHUNK]` float32 that attention of a short block
        fills, in those rows, with the largest share that an entry of each chunk gets of each token's attention,
        averaged over the heads of its group; None: not needed.
    packed: older tokens in 4 bits, where positions are those of all tokens; `unpacked` serves a backend that cannot
        read them.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    rows: Tensor | None = None
    chunk_scores: Tensor | None = None
    packed: Packed | None = None

    def unpacked(self, dtype: torch.dtype) -> KV:
        """Return packed and recent tokens as entries of `dtype` in the order of their positions, with a row for each
        row of queries, so that `rows` is None."""
        assert self.packed is not None
        assert self.chunk_scores is None, "chunks are scored in a target's cache, whose entries are not packed"
        n_token, rows = self.packed.n_token, slice(None) if self.rows is None else self.rows
        recent = torch.stack(self._replace(packed=None).dequantized(dtype))
        _, n_row, _, n_head, head_dim = recent.shape
        # Empty slots of the ring are copied to an extra slot at the end, which is cut off.
        entries = recent.new_empty(2, n_row, n_head, n_token + 1, head_dim)
        for to, older in zip(entries, (self.packed.keys, self.packed.values), strict=True):
            to[:, :, :n_token] = older(rows, dtype)[:, :, :n_token]
        positions = self.packed.recent
        at = torch.where((positions >= 0) & (positions < n_token), positions, n_token)
        entries[:, torch.arange(n_row, device=at.device)[:, None], :, at] = recent.permute(1, 2, 0, 3, 4)
        return KV(*entries[..., :n_token, :].transpose(2, 3))

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values in `dtype`, with a row for each row of queries; no copy where none is needed."""
        if self.packed is not None:
            return self.unpacked(dtype)[:2]
        rows = slice(None) if self.rows is None else self.rows
        key_scales, value_scales = (None if x is None else x[rows] for x in (self.key_scales, self.value_scales))
        return dequantize(self.keys[rows], key_scales, dtype), dequantize(self.values[rows], value_scales, dtype)


def pack(keys: Tensor, values: Tensor) -> Tensor:
    """Stack keys and values `[..., n_kv_head, head_dim]` as a cache stores them, `[..., 2, n_kv_head, head_dim]`.

    Numbers that are not finite become 0: a masked slot has weight 0, and 0 * NaN would spread a token that overflows to
    queries that must not see it. The logits of that token stay NaN.
    """
    return torch.nan_to_num(torch.stack((keys, values), dim=-3), nan=0.0, posinf=0.0, neginf=0.0)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x [..., head_dim]` in 8 bits: entries of `dtype` (a key of LARGEST), and scales `[...]` float32.

    Symmetric, with a scale per vector: the largest magnitude of each becomes the largest that `dtype` can store.
    """
    x = x.float()
    scale = (x.abs().amax(dim=-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scaled = x / scale[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


Store: TypeAlias = "Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]"


def store(entries: Tensor, scales: Tensor | None, rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store `new [B, T, 2, n_kv_head, head_dim]` in `slots [B, T]` int64 of `rows [B, 1]` int64 of one layer's `entries
    [2, max_batch, n_kv_head, capacity, head_dim]`, in 8 bits if these have `scales`, `entries.shape[:-1]`."""
    if scales is None:
        entries[:, rows, :, slots] = new.to(entries.dtype)
    else:
        entries[:, rows, :, slots], scales[:, rows, :, slots] = quantize(new, entries.dtype)


def dequantize(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return stored entries `[..., head_dim]` in `dtype`. scale: their scales `[...]`, or None if they have none."""
    if scale is None:
        return stored.to(dtype)
    return (stored.float() * scale[..., None]).to(dtype)


def stored_as(entries: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Convert entries of one cache to those of a cache of `dtype`, with scales if that has 8 bits."""
    if dtype not in LARGEST:
        return dequantize(entries, scale, dtype), None
    if scale is None or entries.dtype != dtype:
        return quantize(dequantize(entries, scale, torch.float32), dtype)
    return entries, scale
