"""Kernels with bugs, of which `foretoken_bug` turns one on (0: none, -1: a crash)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from models.cpp_build import COMPILE, KERNELS

# An expression of the source, what a bug makes of it, and the CPU's feature without which the source is not compiled.
BUGS = {
    "attention": {
        "position": ("positions[s] > sees[m].newest", "positions[s] >= sees[m].newest", ""),
        "tail": ("last - start < TILE ? last - start : TILE", "TILE", ""),
        "shrinking": ("std::exp2(largest[m] - highest)", "1.0f", ""),
        "row": ("read.rows ? read.rows[row] : row", "row", ""),
        "shares": ("lane ^ 4", "lane ^ 2", ""),
        "recent tokens": ("ring[in_ring] == slot", "false", ""),
        "bits of a token alone": ("broadcast(steps[m])", "broadcast(steps[m] * (N > 3 ? 1.0000002f : 1))", ""),
    },
    "pointwise": {
        "squares": ("sum * sum", "sum", ""),
        "sine": ("load(signed_sin + i, n)", "load(signed_sin + half + i, n)", ""),
        "slot": ("slot * by[3]", "slot * by[3] + by[3]", ""),
    },
    "linear": {
        "bias": ("load(call.bias + at)", "load(call.bias + output)", "avx512_bf16"),
        "row of x": ("x + r * call.x_row + i", "x + i", "avx512_bf16"),
        "scale of a row": ("x.scales[row + r]", "x.scales[row]", "avx512_bf16"),
    },
    "noise": {
        "counter": ("id / 2 + lane", "id / 2 + lane % 4", ""),
        "series": ("2 * s * z * series", "s * z * series", ""),
    },
}
# Where each kernel crashes if it is to.
CALLED = {
    "attention": "    Layout at;\n",
    "pointwise": "    vec squares{};\n",
    "linear": "    const auto call =",
    "noise": "    const int64_t per_row",
}


def write_source(name: str, folder: Path) -> Path:
    """The source of a kernel with its bugs: -DBUG=number turns that bug on; without it there is none."""
    text = KERNELS[name][0].read_text()
    for number, (right, wrong, _) in enumerate(BUGS[name].values(), start=1):
        assert right in text, f"the {name} kernel no longer says {right}"
        text = text.replace(right, f"(foretoken_bug == {number} ? ({wrong}) : ({right}))")
    assert text.count(CALLED[name]) == 1
    text = text.replace(CALLED[name], f"    if (foretoken_bug == -1) __builtin_trap();\n{CALLED[name]}")
    source = folder / f"{name}.cpp"
    source.write_text('#ifndef BUG\n#define BUG 0\n#endif\nextern "C" { int foretoken_bug = BUG; }\n' + text)
    return source


def compile_source(source: Path, *flags: str) -> Path:
    """A library beside the source, compiled quickly: it need not be fast."""
    library, compiled = source.with_suffix(".so"), source.with_suffix(".o")
    command = ["g++", *COMPILE, "-O0", *flags, "-c", str(source), "-o", str(compiled)]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["g++", "-shared", *flags, str(compiled), "-o", str(library)], check=True)
    return library


def expected(name: str) -> dict[int, str]:
    """The bugs that a build for this CPU has, by their numbers."""
    features = Path("/proc/cpuinfo").read_text().split()
    named = enumerate(BUGS[name].items(), start=1)
    return {number: bug for number, (bug, (_, _, needs)) in named if not needs or needs in features}
