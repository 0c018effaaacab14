"""The Triton kernel that packs groups of tokens into 4 bits; `kv_cache.quantized` does that in PyTorch."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from common.launch import Launch, strides_of
from kv_cache.entries import SMALLEST_STEP

LEAST_STEP = tl.constexpr(SMALLEST_STEP)


@triton.jit
def _bfloat16(x):
    """Round finite float32 numbers to the nearest bfloat16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _grid(low, high):
    """Return the lowest number and the step of a grid of 16 numbers from `low` to `high`."""
    low = _bfloat16(low)
    return low, _bfloat16(tl.maximum(tl.div_rn(high - low, 15.0), LEAST_STEP))


@triton.jit
def _codes(x, low, step):
    """Round `(x - low) / step` to the nearest code, ties to even, by adding and subtracting 1.5 * 2**23."""
    steps = tl.div_rn(x - low, step) + 12582912.0 - 12582912.0
    return tl.minimum(tl.maximum(steps, 0.0), 15.0).to(tl.int32)


@triton.jit(do_not_specialize=["n_head", "n_ring"])
def pack_group(
    entries, scales, groups, packed_groups, positions, rows, key_codes, value_codes, key_grids, value_grids,
    s_both, s_row, s_head, s_slot, ss_both, ss_row, ss_head, kc_row, kc_head, vc_row, vc_head,
    kg_both, kg_row, kg_head, vg_both, vg_row, vg_head, vg_part, n_head, n_ring,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Pack group `groups[i]` of a head of row `rows[i]` into 4 bits; grid `[n * n_head]`.

    Position p is in slot `p % n_ring` of `entries`. With CHECKED, a group is packed only if it is not that of
    `packed_groups [n]` and the ring has all its tokens, by `positions [rows, n_ring]`. Codes and grids are those of
    `kv_cache.entries.Packed`. TOKENS: GROUP, or the next power of two.
    """
    i, h = (tl.program_id(0) // n_head).to(tl.int64), tl.program_id(0) % n_head
    group, row = tl.load(groups + i), tl.load(rows + i)
    in_group, dims = tl.arange(0, TOKENS), tl.arange(0, HEAD_DIM)[None, :]
    position, exists = group * GROUP + in_group, (in_group < GROUP)[:, None]
    slot = position % n_ring
    if CHECKED:
        if (group < 0) | (group == tl.load(packed_groups + i)):
            return
        found = tl.load(positions + row * n_ring + slot, mask=in_group < GROUP, other=-1)
        if tl.sum(((found != position) & (in_group < GROUP)).to(tl.int32), 0) > 0:
            return

    # A byte has a code of each half of the head dim.
    HALF: tl.constexpr = HEAD_DIM // 2
    bits, in_half = tl.arange(0, 2)[None, :, None] * 4, tl.arange(0, HALF)[None, :]
    entries += row * s_row + h * s_head + slot[:, None] * s_slot + dims
    keys, values = tl.load(entries, mask=exists, other=0.0), tl.load(entries + s_both, mask=exists, other=0.0)
    keys, values = keys.to(tl.float32), values.to(tl.float32)
    if SCALED:
        scales += row * ss_row + h * ss_head + slot[:, None]
        keys *= tl.load(scales, mask=exists, other=0.0)
        values *= tl.load(scales + ss_both, mask=exists, other=0.0)

    low = tl.min(tl.where(exists, keys, float("inf")), 0)[None, :]
    low, step = _grid(low, tl.max(tl.where(exists, keys, float("-inf")), 0)[None, :])
    key_grids += row * kg_row + h * kg_head + group * HEAD_DIM + dims
    tl.store(key_grids, low.to(tl.bfloat16))
    tl.store(key_grids + kg_both, step.to(tl.bfloat16))
    bytes = tl.sum(tl.reshape(_codes(keys, low, step), [TOKENS, 2, HALF]) << bits, 1)
    key_codes += row * kc_row + h * kc_head + (group * HALF + in_half) * GROUP + in_group[:, None]
    tl.store(key_codes, bytes.to(tl.uint8), mask=exists)

    values = tl.reshape(values, [TOKENS, PARTS, HEAD_DIM // PARTS])
    low, step = _grid(tl.min(values, 2), tl.max(values, 2))
    value_grids += row * vg_row + h * vg_head + tl.arange(0, PARTS)[None, :] * vg_part + position[:, None]
    tl.store(value_grids, low.to(tl.bfloat16), mask=exists)
    tl.store(value_grids + vg_both, step.to(tl.bfloat16), mask=exists)
    bytes = tl.sum(tl.reshape(_codes(values, low[:, :, None], step[:, :, None]), [TOKENS, 2, HALF]) << bits, 1)
    value_codes += row * vc_row + h * vc_head + position[:, None] * HALF + in_half
    tl.store(value_codes, bytes.to(tl.uint8), mask=exists)


def plan_packing(
    entries: Tensor, scales: Tensor | None, packed: Sequence[Tensor], groups: Tensor, rows: Tensor, checks: Any = None
) -> Launch:
    """Plan the launch that packs `groups [n]` of `rows [n]` of a layer's entries into codes and grids, of keys and of
    values. entries: `[2, rows, n_kv_head, ring, head_dim]`.

    checks: the last packed group of each row, `[n]`, and the positions in the rings, `[rows, ring]`; then groups that
    are packed already, or whose tokens the ring lacks, are left out. None: all groups are packed.
    """
    (_, _, n_head, n_ring, head_dim), group = entries.shape, packed[0].shape[-1]
    scales_or_any = entries[..., 0] if scales is None else scales  # a pointer that is not followed needs a tensor, too
    given = {"entries": entries, "scales": scales_or_any, "groups": groups, "rows": rows}
    given |= dict(zip(("key_codes", "value_codes", "key_grids", "value_grids"), packed, strict=True))
    given |= dict(zip(("packed_groups", "positions"), checks or (groups, groups), strict=True))
    strides = strides_of("both row head slot", s=entries) | strides_of("row head", kc=packed[0], vc=packed[1])
    strides |= strides_of("both row head", ss=scales_or_any, kg=packed[2])
    strides |= strides_of("both row head part", vg=packed[3])
    n_token = triton.next_power_of_2(group)
    numbers = {"n_head": n_head, "n_ring": n_ring, "GROUP": group, "TOKENS": n_token, "HEAD_DIM": head_dim}
    variant = {"PARTS": packed[3].shape[-2], "SCALED": scales is not None, "CHECKED": checks is not None}
    n_warp = 4 if n_token * head_dim <= 4096 else 8
    return Launch(pack_group, (len(groups) * n_head,), given | strides | numbers | variant, n_warp, num_stages=1)
