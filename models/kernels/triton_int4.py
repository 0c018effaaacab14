"""Triton kernels for weights in 4 bits: products that unpack them in registers, and weights written out."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.launch import Launch, multiprocessors

# Outputs of a program of `multiply`, the most rows, and about how many programs a multiprocessor is to have.
OUTPUTS, MOST_ROWS, PROGRAMS = (128, 64), 128, 2
WRITTEN_OUTPUTS = 16  # of a program of `write_weights`


@triton.jit
def _weights(words, grid, BITS: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Return the weights `(code - 8) * scale + zero` of a group, whose codes are 4 bits of each word, from bit BITS on.

    grid: of each output, scale and zero in bfloat16, in 32 bits. IN_PAIRS: compute in bfloat16, two in an instruction;
    else in float32.
    """
    if IN_PAIRS:
        # A register has two words; bits of the upper word that move into the lower are masked.
        if BITS == 4:
            words = tl.inline_asm_elementwise("shr.u32 $0, $1, 4;", "=r,r", [words], tl.int16, is_pure=True, pack=2)
        elif BITS == 8:
            words = tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], tl.int16, is_pure=True, pack=2)
        elif BITS == 12:
            words = tl.inline_asm_elementwise("shr.u32 $0, $1, 12;", "=r,r", [words], tl.int16, is_pure=True, pack=2)
        # 0x4300 is 128 in bfloat16, whose last four bits count by ones.
        code = ((words & 15) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        scale = grid.to(tl.int16).to(tl.bfloat16, bitcast=True)
        zero = (grid >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        code = ((words >> BITS) & 15).to(tl.float32) - 8.0
        scale = (grid << 16).to(tl.float32, bitcast=True)
        zero = (grid & -65536).to(tl.float32, bitcast=True)
    return code * scale[:, None] + zero[:, None]


@triton.jit(do_not_specialize=["n_row"])
def multiply(
    x, packed, grids, out, sums, arrived, n_row, n_out, n_in, units_per_split,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write `x [n_row, n_in] W^T` to `out [n_row, n_out]`; grid `[n_out / OUTPUTS, SPLITS, n_row / ROWS]`.

    The product is `W x^T`, so that weights are the operand that tensor cores take from registers. Each split of the
    inputs writes its sums to `sums`; the last program that arrives adds them in order, so that bits do not depend on
    which is the last, and sets `arrived` to zero again.
    """
    block, split, rows_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs, inputs = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, GROUP)
    rows = rows_block * ROWS + tl.arange(0, ROWS)
    exists = (rows < n_row)[None, :]
    first = split * units_per_split
    last = tl.minimum(first + units_per_split, tl.cdiv(n_in, 4 * GROUP))
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    x += rows[None, :].to(tl.int64) * n_in + inputs[:, None]
    for unit in tl.range(first, last):
        words = tl.load(packed + (unit * n_out + outputs)[:, None] * GROUP + inputs[None, :])
        for i in tl.static_range(4):
            group = 4 * unit + i
            weights = _weights(words, tl.load(grids + group * n_out + outputs), 4 * i, IN_PAIRS)
            given = tl.load(x + group * GROUP, mask=exists & (group * GROUP < n_in), other=0.0)
            total = tl.dot(weights.to(given.dtype), given, total)
    out += rows[None, :].to(tl.int64) * n_out + outputs[:, None]
    if SPLITS == 1:
        tl.store(out, total.to(out.dtype.element_ty), mask=exists)
    else:
        tile = rows_block * tl.num_programs(0) + block
        sums += tile.to(tl.int64) * SPLITS * OUTPUTS * ROWS
        sums += tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(sums + split * OUTPUTS * ROWS, total)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for i in tl.static_range(SPLITS):
                total += tl.load(sums + i * OUTPUTS * ROWS, cache_modifier=".cg")
            tl.store(out, total.to(out.dtype.element_ty), mask=exists)
            tl.store(arrived + tile, 0)


def plan_product(
    x: Tensor, packed: Tensor, grids: Tensor, arrived: Tensor, dtype: torch.dtype
) -> tuple[Launch, Tensor]:
    """Plan `x W^T` for `x [N, d_in]` and weights of `quantize.pack_int4`; the result `[N, d_out]` is in `dtype`.

    arrived: int32 zeros, one for each block of 64 outputs and of `MOST_ROWS` rows; the kernel leaves zeros in it.
    """
    (n_row, n_in), (n_unit, n_out, group) = x.shape, packed.shape
    rows = min(max(triton.next_power_of_2(n_row), 16), MOST_ROWS)
    outputs = next(n for n in OUTPUTS if n_out % n == 0)
    n_block, n_row_block = n_out // outputs, triton.cdiv(n_row, rows)
    per_split = triton.cdiv(n_unit, max(1, PROGRAMS * multiprocessors(x.device).n // (n_block * n_row_block)))
    splits = triton.cdiv(n_unit, per_split)
    out = x.new_empty(n_row, n_out, dtype=dtype)
    n_sum = n_block * n_row_block * splits * outputs * rows if splits > 1 else 1
    arguments: dict[str, Any] = {"x": x, "packed": packed, "grids": grids, "out": out, "arrived": arrived}
    arguments |= {"sums": x.new_empty(n_sum, dtype=torch.float32), "n_row": n_row, "n_out": n_out, "n_in": n_in}
    arguments |= {"units_per_split": per_split, "ROWS": rows, "OUTPUTS": outputs, "GROUP": group, "SPLITS": splits}
    arguments["IN_PAIRS"] = x.dtype == torch.bfloat16
    is_large = rows == MOST_ROWS  # sums of so many rows need the registers of more warps, and leave room for few stages
    return Launch(multiply, (n_block, splits, n_row_block), arguments, 8 if is_large else 4, 2 if is_large else 4), out


@triton.jit
def write_weights(packed, grids, out, n_out, n_in, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Write a unit of inputs of OUTPUTS outputs to `out [n_out, n_in]` bfloat16; grid `[units, n_out / OUTPUTS]`."""
    unit, outputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, GROUP)[None, :]
    words = tl.load(packed + (unit * n_out + outputs)[:, None] * GROUP + inputs)
    out += outputs[:, None].to(tl.int64) * n_in + inputs
    for i in tl.static_range(4):
        group = 4 * unit + i
        weights = _weights(words, tl.load(grids + group * n_out + outputs), 4 * i, IN_PAIRS).to(tl.bfloat16)
        tl.store(out + group * GROUP, weights, mask=group * GROUP + inputs < n_in)


def plan_weights(packed: Tensor, grids: Tensor, d_in: int) -> tuple[Launch, Tensor]:
    """Plan `quantize.dequantize`."""
    n_unit, n_out, group = packed.shape
    out = packed.new_empty(n_out, d_in, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"packed": packed, "grids": grids, "out": out, "n_out": n_out, "n_in": d_in}
    arguments |= {"OUTPUTS": WRITTEN_OUTPUTS, "GROUP": group, "IN_PAIRS": packed.is_cuda}
    return Launch(write_weights, (n_unit, n_out // WRITTEN_OUTPUTS), arguments, num_warps=4, num_stages=1), out
