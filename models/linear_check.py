"""Cases that check the linear kernel: weights of 16, 8 and 4 bits, against products in float64."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.say import dtype_name
from models import linear_cpp
from models.kernel_check import Case, Results
from models.quantize import round_to_uint8

D_IN, D_OUT, GROUP = 576, 192, linear_cpp.BLOCK
# Sums are in float32, or exact where x is rounded to 8 bits; the result is rounded to the dtype of x.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


class Layer(NamedTuple):
    """Weights of one storage: as the kernel reads them, as numbers, and PyTorch's product with them."""

    bits: int
    packed: Tensor
    scale: Tensor | None
    numbers: Tensor
    by_pytorch: Callable[[Tensor], Tensor]
    n_rounded: int  # inputs that the kernel rounds together to 8 bits; 0: it rounds none


def layers() -> Iterator[Layer]:
    weight = torch.randn(D_OUT, D_IN, generator=torch.Generator().manual_seed(0))
    halved = weight.bfloat16()
    for_onednn = torch.ops.mkldnn._reorder_linear_weight(halved, 32)

    def in_bfloat16(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, for_onednn, None, "none", [], "")

    yield Layer(16, linear_cpp.pack_bfloat16(halved), None, halved, in_bfloat16, 0)

    scale, zeros = weight.abs().amax(dim=1) / 127, torch.zeros(D_OUT, dtype=torch.int32)
    q = (weight / scale[:, None]).round().to(torch.int8)
    of_weight = torch.ops.onednn.qlinear_prepack(q, None), scale, zeros

    def in_8_bits(x: Tensor) -> Tensor:
        rounded, row_scale = round_to_uint8(x)
        qlinear = torch.ops.onednn.qlinear_pointwise
        return qlinear(rounded, 1.0, 128, *of_weight, None, 1.0, 0, torch.float32, "none", [], "") * row_scale

    yield Layer(8, linear_cpp.pack_int8(q), scale, q * scale[:, None], in_8_bits, D_IN)

    codes = torch.randint(16, (D_OUT, D_IN), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    grids = torch.rand(2, D_OUT, D_IN // GROUP, generator=torch.Generator().manual_seed(2)).bfloat16()
    step, zero = (x[..., None].float() for x in grids)
    numbers = ((codes.unflatten(1, (-1, GROUP)) - 8) * step + zero).flatten(1)
    prepared = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    grid = grids.permute(2, 1, 0).contiguous()

    def in_4_bits(x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16().contiguous(), prepared, GROUP, grid)

    yield Layer(4, linear_cpp.pack_int4(codes, *grids), None, numbers, in_4_bits, GROUP)


def candidate(library: ctypes.CDLL) -> Any:
    function = linear_cpp.function_of(library)

    def multiply(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
        return linear_cpp.linear(x, layer.packed, layer.bits, D_OUT, layer.scale, bias, function)

    return multiply


def REFERENCE(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return layer.by_pytorch(x) + bias


def cases() -> Iterator[Case]:
    """A row, a verification's and a chunk's, cut out of wider ones; and whether a row has the same bits alone."""
    for layer, dtype, n_row in product(layers(), ALLOWED, (1, 5, 33)):
        if layer.bits == 16 and dtype == torch.float32:
            continue
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(n_row))
        x, bias = (normal(n_row, 1) * normal(n_row, D_IN + 32)).to(dtype)[:, :D_IN], 10 * normal(D_OUT)
        rounded = x.double()
        if layer.n_rounded:
            q, scale = round_to_uint8(x.reshape(-1, layer.n_rounded))
            rounded = ((q.double() - 128) * scale).view(x.shape)

        def compute(multiply: Any, layer: Layer = layer, x: Tensor = x, bias: Tensor = bias) -> Results:
            return (multiply(layer, x, bias),)

        def differs(multiply: Any, layer: Layer = layer, x: Tensor = x, bias: Tensor = bias) -> Results:
            return (multiply(layer, x, bias) != torch.cat([multiply(layer, row[None], bias) for row in x]),)

        what = f"{dtype_name(dtype)}, weights of {layer.bits} bits"
        yield Case(what, ALLOWED[dtype], compute, (rounded @ layer.numbers.double().T + bias,), n_row < 33)
        yield Case(what, ALLOWED[dtype], differs, (torch.zeros(n_row, D_OUT),), False)
