"""Part b, beside attention: a linear layer as it is, in 8 and in 4 bits, for the rows of draft steps and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.say import dtype_name
from engine.bench.record import rounded
from models.quantize import GROUP, Int4Linear, Int8Linear, dequantize
from reproduce.gpu_parts.cells import Cell, Options
from reproduce.gpu_parts.devices import time_calls

# Of Llama-3.1-8B: outputs and inputs.
SHAPES = {"wqkv": (6144, 4096), "w13": (28672, 4096), "w2": (4096, 14336)}
QUICK_SHAPES = {"small": (128, 64)}
ROWS, QUICK_ROWS = (8, 16, 32, 64, 128, 256, 2048), (8, 32)
# So many equal layers in turn that the second-level cache holds none when its turn comes, even in 4 bits.
N_LAYER = 8
DEQUANTISED = "int4, dequantised"


def cells(options: Options) -> list[Cell]:
    kinds = ["plain", "int8", "int4, kernel", *([DEQUANTISED] if options.on_cuda else [])]  # a CPU has the kernel alone
    return [
        Cell("b", "gpu_linear", f"{name}, {kind}", partial(linear, options, kind, *shape))
        for name, shape in (QUICK_SHAPES if options.quick else SHAPES).items()
        for kind in kinds
    ]


def linear(options: Options, kind: str, d_out: int, d_in: int) -> dict[str, Any]:
    """Microseconds by rows; of 4 bits both ways, whichever `Int4Linear` would take."""
    weight = torch.randn(d_out, d_in, device=options.device, dtype=options.dtype)
    multipliers = [multiplier(kind, weight, options) for _ in range(N_LAYER)]
    microseconds = {}
    for n_row in QUICK_ROWS if options.quick else ROWS:
        x = torch.randn(n_row, d_in, device=options.device, dtype=options.dtype)
        timing = time_calls([partial(multiply, x) for multiply in multipliers], options)
        microseconds[str(n_row)] = 1e6 * timing.seconds
    record = {"kind": kind, "dtype": dtype_name(options.dtype), "outputs": d_out, "inputs": d_in}
    return rounded(record | {"timed_by": timing.timed_by, "microseconds_by_rows": microseconds})


def multiplier(kind: str, weight: Tensor, options: Options) -> Callable[[Tensor], Tensor]:
    """What multiplies rows by a copy of `weight` of its own."""
    if kind == "plain":
        return partial(F.linear, weight=weight.clone())
    if kind == "int8":
        return Int8Linear(weight, None)
    layer = Int4Linear(weight, None)
    if kind == DEQUANTISED:
        return lambda x: F.linear(x, dequantize(layer.weight, layer.scale_and_zero))
    if options.on_cuda:
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, layer.weight, GROUP, layer.scale_and_zero)
    return layer
