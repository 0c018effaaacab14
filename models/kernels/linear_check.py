"""Cases that check the linear kernel: weights of 32, 16, 8 and 4 bits, against products in float64."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from common.say import dtype_name
from kv_cache.entries import quantize
from models.kernels import linear_cpp
from models.kernels.check import Case, Results
from models.kernels.quantize import GROUP, quantize_groups, round_to_uint8

D_IN, D_OUT = 576, 192
# Sums are in float32, or exact where x is rounded to 8 bits; the result is rounded to the dtype of x.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


class Layer(NamedTuple):
    """Weights of some bits: packed for the kernel, and dequantised."""

    bits: int
    packed: Tensor
    scale: Tensor | None
    numbers: Tensor
    n_rounded: int = 0  # inputs that the kernel rounds together to 8 bits; 0: it rounds none
    dtypes: tuple[torch.dtype, ...] = tuple(ALLOWED)  # of x


Multiply = Callable[[Layer, Tensor, Tensor], Tensor]  # layer, x, bias -> y


def layers() -> Iterator[Layer]:
    """Yield random weights in 32, 16, 8 and 4 bits."""
    weight = torch.randn(D_OUT, D_IN, generator=torch.Generator().manual_seed(0))
    halved = weight.bfloat16()
    yield Layer(16, linear_cpp.pack_words(halved), None, halved, dtypes=(torch.bfloat16,))
    for numbers in halved, weight:
        packed = linear_cpp.pack_words(numbers, linear_cpp.FLOAT_BLOCK)
        yield Layer(8 * numbers.itemsize, packed, None, numbers, dtypes=(torch.float32,))
    q, scale = quantize(weight, torch.int8)
    yield Layer(8, linear_cpp.pack_int8(q), scale, q * scale[:, None], D_IN)
    q, scale, low = quantize_groups(weight)
    grid = scale.bfloat16(), (low + 8 * scale).bfloat16()
    step, zero = (x.float()[..., None] for x in grid)
    numbers = ((q.unflatten(1, (-1, GROUP)) - 8) * step + zero).flatten(1)
    yield Layer(4, linear_cpp.pack_int4(q, *grid), None, numbers, GROUP)


def candidate(library: ctypes.CDLL) -> Multiply:
    run = partial(linear_cpp.linear, function=linear_cpp.function_of(library))
    return lambda layer, x, bias: run(x, layer.packed, layer.bits, D_OUT, layer.scale, bias)


def cases() -> Iterator[Case]:
    """Yield cases of 1 to 97 rows with gaps between them, in groups of 1 to 12 and in two panels: products, and whether
    a row has equal bits alone."""
    for layer, dtype, n_row in product(layers(), ALLOWED, (1, 2, 3, 4, 5, 13, 17, 19, 33, 97)):
        if dtype not in layer.dtypes:
            continue
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(n_row))
        x, bias = (normal(n_row, 1) * normal(n_row, D_IN + 32)).to(dtype)[:, :D_IN], 10 * normal(D_OUT)
        rounded = x.double()
        if layer.n_rounded:
            q, scale = round_to_uint8(x.reshape(-1, layer.n_rounded))
            rounded = ((q.double() - 128) * scale).view(x.shape)
        what, expected = f"{dtype_name(dtype)}, weights of {layer.bits} bits", rounded @ layer.numbers.double().T + bias
        is_timed = layer.bits == 16 and dtype == torch.bfloat16
        yield Case(what, ALLOWED[dtype], partial(_product, layer, x, bias), (expected,), is_timed)
        yield Case(what, ALLOWED[dtype], partial(_differs, layer, x, bias), (torch.zeros(n_row, D_OUT),))


def _product(layer: Layer, x: Tensor, bias: Tensor, multiply: Multiply) -> Results:
    return (multiply(layer, x, bias),)


def _differs(layer: Layer, x: Tensor, bias: Tensor, multiply: Multiply) -> Results:
    return (multiply(layer, x, bias) != torch.cat([multiply(layer, row[None], bias) for row in x]),)
