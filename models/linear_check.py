"""Cases that check the linear kernel: weights of 16, 8 and 4 bits, against products in float64."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from common.say import dtype_name
from kv_cache.entries import quantize
from models import linear_cpp
from models.kernel_check import Case, Results
from models.quantize import round_to_uint8

D_IN, D_OUT, GROUP = 576, 192, linear_cpp.BLOCK
# Sums are in float32, or exact where x is rounded to 8 bits; the result is rounded to the dtype of x.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


class Layer(NamedTuple):
    """Weights of some bits: as the kernel reads them, as numbers, and PyTorch's product with them."""

    bits: int
    packed: Tensor
    scale: Tensor | None
    numbers: Tensor
    by_pytorch: Callable[[Tensor], Tensor]
    n_rounded: int  # inputs that the kernel rounds together to 8 bits; 0: it rounds none


Multiply = Callable[[Layer, Tensor, Tensor], Tensor]  # layer, x, bias -> y


def layers() -> Iterator[Layer]:
    ops, weight = torch.ops, torch.randn(D_OUT, D_IN, generator=torch.Generator().manual_seed(0))

    halved = weight.bfloat16()
    blocked = ops.mkldnn._reorder_linear_weight(halved, 32), None, "none", [], ""
    in_16_bits = linear_cpp.pack_bfloat16(halved)
    yield Layer(16, in_16_bits, None, halved, lambda x: ops.mkldnn._linear_pointwise(x, *blocked), 0)

    q, scale = quantize(weight, torch.int8)
    prepacked = ops.onednn.qlinear_prepack(q, None), scale, torch.zeros(D_OUT, dtype=torch.int32)

    def in_8_bits(x: Tensor) -> Tensor:
        rounded, row_scale = round_to_uint8(x)
        options = None, 1.0, 0, torch.float32, "none", [], ""
        return ops.onednn.qlinear_pointwise(rounded, 1.0, 128, *prepacked, *options) * row_scale

    yield Layer(8, linear_cpp.pack_int8(q), scale, q * scale[:, None], in_8_bits, D_IN)

    codes = torch.randint(16, (D_OUT, D_IN), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    grids = torch.rand(2, D_OUT, D_IN // GROUP, generator=torch.Generator().manual_seed(2)).bfloat16()
    step, zero = grids[..., None].float()
    numbers = ((codes.unflatten(1, (-1, GROUP)) - 8) * step + zero).flatten(1)
    tiles, grid = ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), grids.permute(2, 1, 0).contiguous()

    def in_4_bits(x: Tensor) -> Tensor:
        return ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16().contiguous(), tiles, GROUP, grid)

    yield Layer(4, linear_cpp.pack_int4(codes, *grids), None, numbers, in_4_bits, GROUP)


def candidate(library: ctypes.CDLL) -> Multiply:
    run = partial(linear_cpp.linear, function=linear_cpp.function_of(library))
    return lambda layer, x, bias: run(x, layer.packed, layer.bits, D_OUT, layer.scale, bias)


def REFERENCE(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return layer.by_pytorch(x) + bias


def cases() -> Iterator[Case]:
    """Yield a row, a verification's rows and a chunk's, cut out of wider ones; each also for equal bits alone."""
    for layer, dtype, n_row in product(layers(), ALLOWED, (1, 5, 33)):
        if layer.bits == 16 and dtype == torch.float32:
            continue
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(n_row))
        x, bias = (normal(n_row, 1) * normal(n_row, D_IN + 32)).to(dtype)[:, :D_IN], 10 * normal(D_OUT)
        rounded = x.double()
        if layer.n_rounded:
            q, scale = round_to_uint8(x.reshape(-1, layer.n_rounded))
            rounded = ((q.double() - 128) * scale).view(x.shape)
        what, expected = f"{dtype_name(dtype)}, weights of {layer.bits} bits", rounded @ layer.numbers.double().T + bias
        yield Case(what, ALLOWED[dtype], partial(_product, layer, x, bias), (expected,), n_row < 33)
        yield Case(what, ALLOWED[dtype], partial(_differs, layer, x, bias), (torch.zeros(n_row, D_OUT),), False)


def _product(layer: Layer, x: Tensor, bias: Tensor, multiply: Multiply) -> Results:
    return (multiply(layer, x, bias),)


def _differs(layer: Layer, x: Tensor, bias: Tensor, multiply: Multiply) -> Results:
    return (multiply(layer, x, bias) != torch.cat([multiply(layer, row[None], bias) for row in x]),)
