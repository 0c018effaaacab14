"""What the Triton kernels compile to: registers, shared memory and spills of every variant, without a GPU.

    python reproduce/kernel_report.py --output reproduce/results/kernel_report.jsonl

Compiles the launches that the backend would make, with the ptxas that comes with Triton. Exits with code 1
and names the variants if one of them spills registers or needs more shared memory than a block may have.
"""

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import torch
from engine.bench.arguments import Parser

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import dtype_name, say
from kv_cache.entries import KV, largest
from models.attention.base import AttentionSpec

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from models.attention import triton_backend
except ImportError:
    triton = None

# Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming Guide, table 30).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
# (tokens, group) with so many rows per KV head.
BLOCKS = {16: (4, 4), 32: (8, 4), 64: (16, 4), 128: (16, 8)}
DTYPES, HEAD_DIMS = {"bfloat16": torch.bfloat16, "float16": torch.float16}, (64, 128)
TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
}
BATCH, N_KV_HEAD = 8, 8


@dataclass(frozen=True)
class Cache:
    """The kinds of slots that compile to code of their own."""

    in_order: bool
    sliding_window: int | None = None
    n_slot: int = 32768


CACHES = {
    "in order": Cache(in_order=True),
    "in order, window": Cache(in_order=True, sliding_window=4096),
    "positions": Cache(in_order=False),
    "one chunk": Cache(in_order=False, n_slot=256),
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: bytes but for the registers of a thread and the threads of a block."""

    variant: str
    arch: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    threads: int


def launches(
    dtype: torch.dtype, entries: torch.dtype, head_dim: int, n_row: int, cache: Cache
) -> list["triton_backend.Launch"]:
    """What the backend would launch, on tensors without storage."""
    empty = partial(torch.empty, device="meta")
    n_token, group = BLOCKS[n_row]
    q = empty(BATCH, n_token, N_KV_HEAD * group, head_dim, dtype=dtype)
    stored = empty(BATCH, N_KV_HEAD, cache.n_slot, head_dim, dtype=entries).transpose(1, 2)
    scales = empty(BATCH, N_KV_HEAD, cache.n_slot).transpose(1, 2) if entries in largest() else None
    spec = AttentionSpec(N_KV_HEAD * group, N_KV_HEAD, head_dim, cache.sliding_window, dtype)
    positions = empty(BATCH, cache.n_slot, dtype=torch.int64)
    slots = SimpleNamespace(positions=positions, in_order=cache.in_order, block_ends_view=False)
    block = triton_backend.Block(spec, empty(BATCH, n_token, dtype=torch.int64), slots)
    return triton_backend.plan(q, KV(stored, stored, scales, scales), block)[0]


def variants(
    arch: int, dtypes: Sequence[torch.dtype], head_dims: Sequence[int], n_rows: Sequence[int]
) -> Iterator[tuple[str, "triton_backend.Launch"]]:
    """Every launch of its own kind, with its name. The merge of chunks depends on dtype and head_dim alone."""
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        stored = [dtype, torch.int8, torch.float8_e4m3fn]
        runs = [entries for entries in stored if triton_backend.runs_on(divmod(arch, 10), dtype, entries)]
        merge = None
        for entries, n_row, (name, cache) in itertools.product(runs, n_rows, CACHES.items()):
            split, *rest = launches(dtype, entries, head_dim, n_row, cache)
            merge = next(iter(rest), merge)
            yield f"{dtype_name(dtype)}, {dtype_name(entries)} KV, {head_dim} x {n_row} rows, {name}", split
        if merge is not None:
            yield f"{dtype_name(dtype)}, {head_dim}, merge", merge


def as_source(launch: "triton_backend.Launch") -> "ASTSource":
    """The kernel, specialized to its arguments as Triton would do at the launch."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        may_specialize = not parameter.do_not_specialize
        is_integer = isinstance(value, int)
        if parameter.is_constexpr or (is_integer and may_specialize and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif is_integer:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        else:
            signature[name] = f"*{TRITON_NAMES[value.dtype]}"
        # Tensors are allocated at multiples of 16 bytes.
        is_aligned = isinstance(value, torch.Tensor) or (is_integer and may_specialize and value % 16 == 0)
        if is_aligned and signature[name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(variant: str, launch: "triton_backend.Launch", arch: int) -> Compiled:
    """Compile for `sm_<arch>` and read what ptxas says."""
    knobs, log = triton.knobs, io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(as_source(launch), target=GPUTarget("cuda", arch, 32), options=options)
    said = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    registers, stores, loads = (max(map(int, re.findall(pattern, log.getvalue()))) for pattern in said)
    return Compiled(variant, arch, registers, compiled.metadata.shared, stores, loads, 32 * launch.num_warps)


def problems(compiled: Compiled) -> list[str]:
    """What is wrong with a compiled kernel; nothing, if all is well."""
    found = []
    if compiled.spill_stores or compiled.spill_loads:
        found.append(f"spills {compiled.spill_stores} bytes and reads back {compiled.spill_loads}")
    if compiled.shared > SHARED_LIMIT[compiled.arch]:
        found.append(f"needs {compiled.shared} bytes of shared memory of {SHARED_LIMIT[compiled.arch]}")
    return [f"sm_{compiled.arch}, {compiled.variant}: {problem}" for problem in found]


def require_triton() -> None:
    if triton is None:
        what, required = "the kernels cannot be compiled", "triton 3.6 or newer"
        where, fix = "reproduce/kernel_report.py", "pip install -r requirements-dev.txt"
        raise ConfigError(what, where=where, seen="no triton package", required=required, fix=fix)


def compile_all(
    archs: Sequence[int], dtypes: Sequence[torch.dtype], head_dims: Sequence[int], n_rows: Sequence[int]
) -> list[Compiled]:
    reports = []
    for arch in archs:
        for variant, launch in variants(arch, dtypes, head_dims, n_rows):
            reports.append(compile_launch(variant, launch, arch))
            say(f"compiled {variant} for sm_{arch}")
    return reports


def publish_report(reports: Sequence[Compiled], output: str | None) -> list[str]:
    """Print the table and record it; returns the problems."""
    lines = [f"{'variant':<62} {'arch':>5} {'registers':>9} {'shared':>7} {'spills':>7} {'threads':>7}"]
    for one in reports:
        spills = one.spill_stores + one.spill_loads
        numbers = f"{one.registers:>9} {one.shared:>7} {spills:>7} {one.threads:>7}"
        lines.append(f"{one.variant:<62} sm_{one.arch} {numbers}")
    archs = dict.fromkeys(one.arch for one in reports)
    record = {
        "benchmark": "kernel_report",
        "triton_version": triton.__version__,
        "variants": len(reports),
        "max_registers": max(one.registers for one in reports),
        "max_shared_bytes": {f"sm_{arch}": max(one.shared for one in reports if one.arch == arch) for arch in archs},
        "problems": [problem for one in reports for problem in problems(one)],
        "kernels": [asdict(one) for one in reports],
        **provenance(),
    }
    n_problems = len(record["problems"])
    summary = f"{len(reports)} variants, at most {record['max_registers']} registers, {n_problems} problems"
    publish(output, record, *lines, summary)
    return record["problems"]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=list(SHARED_LIMIT), choices=SHARED_LIMIT)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of the model")
    parser.add_argument("--head_dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BLOCKS), choices=BLOCKS, help="tokens times group")
    parser.add_argument("--output", help="append the JSON record to this file")
    args = parser.parse_args()
    require_triton()
    require_appendable(args.output)
    reports = compile_all(args.archs, [DTYPES[name] for name in args.dtypes], args.head_dims, args.rows)
    if found := publish_report(reports, args.output):
        print("\n".join(found), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
