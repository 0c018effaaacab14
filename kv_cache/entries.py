"""What a cache hands to attention: one layer's keys and values, and their scales where they are stored in 8 bits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Keeps the scale of an all-zero vector from dividing by zero.
SMALLEST_SCALE = 1e-12


@cache
def largest() -> dict[torch.dtype, float]:
    """The largest magnitude that each 8-bit storage holds."""
    return {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KV(NamedTuple):
    """Keys and values `[B, C, n_kv_head, head_dim]`, the last stride 1.

    Of int8 or float8_e4m3fn entries the value is `stored * scale`, with one scale per token and head,
    `[B, C, n_kv_head]` float32; None where the entries are the values. rows: `[B']` int64, the row of the entries that
    each row of queries attends to; None where these are the same rows. noted: where attention of a short block over
    entries in the order of their positions also notes, in those rows, the share that each entry gets of each token's
    attention, averaged over the heads of its group: `[max_batch, >= T, n_kv_head, >= C]` float32; else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    noted: torch.Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `dtype`, one row for each of the queries'; the entries themselves where they are that."""
        if self.rows is not None:
            scales = (None if x is None else x[self.rows] for x in (self.key_scales, self.value_scales))
            return KV(self.keys[self.rows], self.values[self.rows], *scales).dequantized(dtype)
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
