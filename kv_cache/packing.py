"""The Triton kernel that packs groups of tokens into 4 bits, as `kv_cache.quantized` does in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from common.launch import Launch, strides_of

LEVELS, SMALLEST_STEP = tl.constexpr(15), tl.constexpr(1e-8)


@triton.jit
def _bfloat16(x):
    """Finite numbers in float32 as bfloat16 rounds them, to even where two are as near."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _grid(low, high):
    """The lowest number and the step of what lies between two."""
    low = _bfloat16(low)
    return low, _bfloat16(tl.maximum(tl.div_rn(high - low, 15.0), SMALLEST_STEP))


@triton.jit
def _codes(x, low, step):
    """What `x` is in steps from `low` on; adding so much rounds to even."""
    steps = tl.div_rn(x - low, step) + 12582912.0 - 12582912.0
    return tl.minimum(tl.maximum(steps, 0.0), LEVELS).to(tl.uint8)


@triton.jit
def _loaded(entries, scales, slots, dims, exists, s_slot, SCALED: tl.constexpr):
    """Entries at `slots` and `dims`, which broadcast, as float32."""
    x = tl.load(entries + slots * s_slot + dims, mask=exists, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(scales + slots, mask=exists, other=0.0)
    return x


@triton.jit(do_not_specialize=["n_head", "n_ring"])
def pack_group(
    entries, scales, groups, packed_groups, held, rows, key_codes, value_codes, key_grids, value_grids,
    s_both, s_row, s_head, s_slot, ss_both, ss_row, ss_head, kc_row, kc_head, vc_row, vc_head,
    kg_both, kg_row, kg_head, vg_both, vg_row, vg_head, vg_part, n_head, n_ring,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """One program: one of `groups [n]` of one head, of row `rows[i]` of all tensors; grid `[n * n_head]`.

    Position p lies in slot `p % n_ring` of `entries`. With CHECKED only what is not in 4 bits already, which is
    `packed_groups [n]`, and whose tokens the ring has by `held [rows, n_ring]`. Codes and grids are as of
    `kv_cache.entries.Packed`. TOKENS: GROUP, or the next power of two.
    """
    i, h = (tl.program_id(0) // n_head).to(tl.int64), tl.program_id(0) % n_head
    group, row = tl.load(groups + i), tl.load(rows + i)
    in_group = tl.arange(0, TOKENS)
    position = group * GROUP + in_group
    slot = position % n_ring
    if CHECKED:
        if (group < 0) | (group == tl.load(packed_groups + i)):
            return
        there = tl.load(held + row * n_ring + slot, mask=in_group < GROUP, other=-1)
        if tl.sum(((there != position) & (in_group < GROUP)).to(tl.int32), 0) > 0:
            return

    entries += row * s_row + h * s_head
    scales += row * ss_row + h * ss_head
    HALF: tl.constexpr = HEAD_DIM // 2
    # Keys: each channel has a grid, [TOKENS, HALF] of either half.
    token, dims = in_group[:, None], tl.arange(0, HALF)[None, :]
    exists, byte = token < GROUP, tl.zeros([TOKENS, HALF], tl.uint8)
    grid_at = key_grids + row * kg_row + h * kg_head + group * HEAD_DIM + dims
    for half in tl.static_range(2):
        x = _loaded(entries, scales, slot[:, None], half * HALF + dims, exists, s_slot, SCALED)
        lowest = tl.min(tl.where(exists, x, float("inf")), 0)[None, :]
        low, step = _grid(lowest, tl.max(tl.where(exists, x, float("-inf")), 0)[None, :])
        tl.store(grid_at + half * HALF, low.to(tl.bfloat16))
        tl.store(grid_at + half * HALF + kg_both, step.to(tl.bfloat16))
        byte |= _codes(x, low, step) << (4 * half)
    tl.store(key_codes + row * kc_row + h * kc_head + (group * HALF + dims) * GROUP + token, byte, mask=exists)

    # Values: parts of the head dim have one, of which each half has some, [TOKENS, parts, channels].
    IN_HALF: tl.constexpr = (PARTS + 1) // 2
    CHANNELS: tl.constexpr = HALF // IN_HALF
    entries, scales = entries + s_both, scales + ss_both
    token, part = in_group[:, None, None], tl.arange(0, IN_HALF)[None, :, None]
    exists, dims = token < GROUP, part * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    lower = _loaded(entries, scales, slot[:, None, None], dims, exists, s_slot, SCALED)
    upper = _loaded(entries, scales, slot[:, None, None], HALF + dims, exists, s_slot, SCALED)
    lows, highs = tl.min(lower, 2)[:, :, None], tl.max(lower, 2)[:, :, None]
    lows_of_upper, highs_of_upper = tl.min(upper, 2)[:, :, None], tl.max(upper, 2)[:, :, None]
    if PARTS == 1:
        lows, highs = tl.minimum(lows, lows_of_upper), tl.maximum(highs, highs_of_upper)
        lows_of_upper, highs_of_upper = lows, highs
    grid_at = value_grids + row * vg_row + h * vg_head + part * vg_part + position[:, None, None]
    low, step = _grid(lows, highs)
    tl.store(grid_at, low.to(tl.bfloat16), mask=exists)
    tl.store(grid_at + vg_both, step.to(tl.bfloat16), mask=exists)
    byte = _codes(lower, low, step)
    low, step = _grid(lows_of_upper, highs_of_upper)
    grid_at += PARTS // 2 * vg_part
    tl.store(grid_at, low.to(tl.bfloat16), mask=exists)
    tl.store(grid_at + vg_both, step.to(tl.bfloat16), mask=exists)
    byte |= _codes(upper, low, step) << 4
    tl.store(value_codes + row * vc_row + h * vc_head + position[:, None, None] * HALF + dims, byte, mask=exists)


def plan_packing(
    entries: torch.Tensor,
    scales: torch.Tensor | None,
    packed: Sequence[torch.Tensor],
    groups: torch.Tensor,
    rows: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launch:
    """The launch that packs `groups [n]` of `rows [n]` of a layer's entries `[2, rows, n_kv_head, ring, head_dim]`.

    packed: codes and grids, of keys and of values. held: with which a group is packed only where it was not, and the
    ring has it: the last group of each row that was, `[n]`, and the positions that rings hold, `[rows, ring]`.
    """
    key_codes, value_codes, key_grids, value_grids = packed
    (_, _, n_head, n_ring, head_dim), group = entries.shape, key_codes.shape[-1]
    of_scales = entries[..., 0] if scales is None else scales  # a pointer that is never followed
    packed_groups, positions = (groups, groups) if held is None else held
    tensors = {"entries": entries, "scales": of_scales, "groups": groups, "packed_groups": packed_groups, "rows": rows}
    tensors |= {"held": positions, "key_codes": key_codes, "value_codes": value_codes}
    tensors |= {"key_grids": key_grids, "value_grids": value_grids}
    strides = strides_of("both row head slot", s=entries) | strides_of("both row head", ss=of_scales, kg=key_grids)
    strides |= strides_of("row head", kc=key_codes, vc=value_codes) | strides_of("both row head part", vg=value_grids)
    n_token = triton.next_power_of_2(group)
    numbers = {"n_head": n_head, "n_ring": n_ring, "GROUP": group, "TOKENS": n_token, "HEAD_DIM": head_dim}
    variant = {"PARTS": value_grids.shape[-2], "SCALED": scales is not None, "CHECKED": held is not None}
    n_warp = 4 if n_token * head_dim <= 4096 else 8
    return Launch(pack_group, (len(groups) * n_head,), tensors | strides | numbers | variant, n_warp, num_stages=1)
