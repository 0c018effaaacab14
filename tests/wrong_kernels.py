"""Kernels with bugs: each source with all of its bugs, of which `foretoken_bug` turns one on (0: none, -1: it crashes)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from models.cpp_build import COMPILE, SOURCES

# An expression of the source, and what a bug makes of it.
BUGS = {
    "attention": {
        "exponential": ("2.402265069591007e-1f", "2.4e-1f"),
        "position": ("slots[start - first + s] > queries[m]", "slots[start - first + s] >= queries[m]"),
        "window": ("slots[start - first + s] < oldest[m]", "slots[start - first + s] <= oldest[m]"),
        "tail": ("last - start < TILE ? last - start : TILE", "TILE"),
        "values": ("values + start * value_stride", "values + start * value_stride + 1"),
        "scale of a key": ("key_scales[(start + s) * at.scale_slot]", "key_scales[start * at.scale_slot]"),
        "scale of a value": ("value_scales[(start + s) * at.scale_slot]", "value_scales[start * at.scale_slot]"),
        "shrinking": ("std::exp2(largest[m] - highest)", "1.0f"),
        "row": ("rows ? rows[row] : row", "row"),
        "shares": ("lane ^ 4", "lane ^ 2"),
        "8 bits": ("0x1p120f", "0x1.01p120f"),
        "4 bits": ("bytes >> 4", "bytes >> 5"),
        "bits of a token alone": (
            "broadcast(q[m * D + d])",
            "broadcast(N > 3 ? q[m * D + d] * 1.0000002f : q[m * D + d])",
        ),
    },
    "pointwise": {
        "norm": ("sum * sum", "sum * broadcast(1.0f)"),
        "epsilon of the mean": ("sum_of_lanes(squares) / dim", "sum_of_lanes(squares) / (dim + 1)"),
        "last numbers of a row": ("i + W <= n", "i < n - 1"),
        "sine": ("load(signed_sin + i, n)", "load(signed_sin + half + i, n)"),
        "gate": ("broadcast(1.0f) + exp_of_minus(x)", "broadcast(1.0f) - exp_of_minus(x)"),
        "bytes": ("*scale < 1e-12f", "*scale < 1e-1f"),
    },
}
CALLED = {"attention": "    Layout at;\n", "pointwise": "    vec squares{};\n"}


def write_source(name: str, folder: Path) -> Path:
    """The source of a kernel with its bugs, none of them turned on unless the compiler is told -DBUG=number."""
    text = SOURCES[name].read_text()
    for number, (right, wrong) in enumerate(BUGS[name].values(), start=1):
        assert right in text, f"the {name} kernel no longer says {right}"
        text = text.replace(right, f"(foretoken_bug == {number} ? ({wrong}) : ({right}))")
    assert CALLED[name] in text
    text = text.replace(CALLED[name], f"    if (foretoken_bug == -1) __builtin_trap();\n{CALLED[name]}")
    start = '#ifndef BUG\n#define BUG 0\n#endif\nextern "C" { int foretoken_bug = BUG; }\n'
    source = folder / f"{name}.cpp"
    source.write_text(start + text)
    return source


def compile_source(source: Path, *flags: str) -> Path:
    """A library beside the source: quickly, as it is not meant to be fast."""
    library, optimised = source.with_suffix(".so"), [*COMPILE, "-march=native", "-O0", *flags]
    compiled = source.with_suffix(".o")
    subprocess.run(["g++", *optimised, "-c", str(source), "-o", str(compiled)], check=True, capture_output=True)
    subprocess.run(["g++", "-shared", *flags, str(compiled), "-o", str(library)], check=True)
    return library
