"""Triton kernels for `quantize`: round activations to 8 bits, and scale products."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from common.launch import Launch, run
from kv_cache.entries import SMALLEST_SCALE, quantize

LEAST_SCALE = tl.constexpr(SMALLEST_SCALE)
OUTPUTS, WARPS = 1024, 4  # per program: outputs that it scales, warps


@triton.jit(do_not_specialize=["n_row"])
def quantize_row(x, out, scales, n_row, n_in, BLOCK: tl.constexpr):
    """Write a row of `x [n_row, n_in]` in 8 bits to `out`, and its scale; zeros to rows of `out` from `n_row` on."""
    row, inputs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    numbers = tl.load(x + row * n_in + inputs, mask=(inputs < n_in) & (row < n_row), other=0.0).to(tl.float32)
    # Magnitudes are compared as integers, where NaN is the largest; a maximum of floats would drop it.
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, 127.0)
    scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
    steps = tl.div_rn(numbers, scale) + 12582912.0 - 12582912.0  # rounds to even, as in `kv_cache.triton_packing`
    tl.store(out + row * n_in + inputs, steps.to(tl.int32).to(tl.int8), mask=inputs < n_in)
    tl.store(scales + row, scale, mask=row < n_row)


def plan_rows(x: Tensor, fewest: int) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """Plan `kv_cache.entries.quantize` of `x [N, d_in]`; the result has at least `fewest` rows."""
    n_row, n_in = x.shape
    out, scales = x.new_empty(max(fewest, n_row), n_in, dtype=torch.int8), x.new_empty(n_row, dtype=torch.float32)
    block = triton.next_power_of_2(n_in)
    arguments = {"x": x.contiguous(), "out": out, "scales": scales, "n_row": n_row, "n_in": n_in, "BLOCK": block}
    return Launch(quantize_row, (len(out),), arguments, min(max(block // 512, 4), 32), num_stages=1), (out, scales)


@triton.jit
def scale_products(sums, scales, row_scales, out, n_out, BLOCK: tl.constexpr):
    """Multiply `sums [N, n_out]` int32 by the scales of outputs and rows."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    products = tl.load(sums + row * n_out + at, mask=at < n_out).to(tl.float32)
    products = products * tl.load(scales + at, mask=at < n_out) * tl.load(row_scales + row)
    tl.store(out + row * n_out + at, products.to(out.dtype.element_ty), mask=at < n_out)


def plan_products(sums: Tensor, scales: Tensor, row_scales: Tensor, dtype: torch.dtype) -> tuple[Launch, Tensor]:
    """Plan to scale sums of products in 8 bits, for as many rows as have a scale; the result is in `dtype`."""
    n_row, n_out = len(row_scales), sums.shape[1]
    arguments = {"sums": sums, "scales": scales, "row_scales": row_scales, "n_out": n_out, "BLOCK": OUTPUTS}
    arguments["out"] = out = sums.new_empty(n_row, n_out, dtype=dtype)
    return Launch(scale_products, (n_row, triton.cdiv(n_out, OUTPUTS)), arguments, WARPS, num_stages=1), out


def difference(device: str) -> str | None:
    """Return how the kernels' results on a device differ from PyTorch's on the CPU; None if all are equal."""
    generator = torch.Generator().manual_seed(0)
    rows, scales = quantize(x := torch.randn(3, 200, generator=generator), torch.int8)
    sums = torch.randint(-(2**31), 2**31, (5, 200), generator=generator).int()
    expected = F.pad(rows, (0, 0, 0, 2)), scales, sums[:3] * x[0] * scales[:, None]
    x, sums, scales = (tensor.to(device) for tensor in (x, sums, scales))
    found = *run(plan_rows(x, 5)), run(plan_products(sums, x[0], scales, x.dtype))
    equal = [torch.equal(ours.cpu(), pytorchs) for ours, pytorchs in zip(found, expected, strict=True)]
    return None if all(equal) else f"equal activations, their scales, products: {equal}"
