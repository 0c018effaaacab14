"""Kernels with bugs, of which `foretoken_bug` turns one on (0: none, -1: a crash)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from models.cpp_build import COMPILE, KERNELS

# An expression of the source, what a bug makes of it, and the CPU's feature without which the source is not compiled.
BUGS = {
    "attention": {
        "scale": ("1.4426950408889634f", "1.45f", ""),
        "exponential": ("2.402265069591007e-1f", "2.4e-1f", ""),
        "position": ("positions[s] > sees[m].newest", "positions[s] >= sees[m].newest", ""),
        "window": ("positions[s] < sees[m].oldest", "positions[s] <= sees[m].oldest", ""),
        "tail": ("last - start < TILE ? last - start : TILE", "TILE", ""),
        "values": ("values + start * value_stride", "values + start * value_stride + 4", ""),
        "scales of 8 bits": ("by[(start + s) * scale_stride]", "by[start * scale_stride]", ""),
        "scales of values": (
            "multiply(value_scales, start, n, n_row, weights)",
            "multiply(key_scales, start, n, n_row, weights)",
            "",
        ),
        "shrinking": ("std::exp2(largest[m] - highest)", "1.0f", ""),
        "row": ("read.rows ? read.rows[row] : row", "row", ""),
        "token of a second block": ("(block + m) / at.group", "m / at.group", ""),
        "shares": ("lane ^ 4", "lane ^ 2", ""),
        "8 bits": ("0x1p120f", "0x1.01p120f", ""),
        "4 bits": ("bytes >> 4", "bytes >> 5", ""),
        "recent tokens": ("ring[in_ring] == slot", "false", ""),
        "bits of a token alone": ("broadcast(steps[m])", "broadcast(steps[m] * (N > 3 ? 1.0000002f : 1))", ""),
        "planes": ("(ivec)acc[m][half] << P::KEY_SHIFT", "(ivec)acc[m][half] << P::VALUE_SHIFT", "avx512_vnni"),
        "unsigned keys": ("128u * _mm512_reduce_add_epi32((__m512i)sum)", "0u", "avx512_vnni"),
        "order of values": ("interleaved<P::PACK>(d)", "d", "avx512_bf16"),
        "pairs": ("(__m512)load(from + W)", "(__m512)load(from)", "avx512_bf16"),
    },
    "pointwise": {
        "squares": ("sum * sum", "sum", ""),
        "mean": ("sum_of_lanes(squares) / dim", "sum_of_lanes(squares) / (dim + 1)", ""),
        "last numbers of a row": ("(int)(n - i)", "(int)(n - i - 1)", ""),
        "sine": ("load(signed_sin + i, n)", "load(signed_sin + half + i, n)", ""),
        "gate": ("broadcast(1.0f) + exp_of_minus(x)", "broadcast(1.0f) - exp_of_minus(x)", ""),
        "slot": ("slot * by[3]", "slot * by[3] + by[3]", ""),
        "largest of a vector": ("most / 127", "most / 126", ""),
    },
    "linear": {
        "bias": ("load(call.bias + at)", "load(call.bias + output)", "avx512_bf16"),
        "row of x": ("x + r * call.x_row + i", "x + i", "avx512_bf16"),
        "largest of x": ("_mm512_reduce_max_ps(top) / 127", "_mm512_reduce_max_ps(top) / 120", "avx512_bf16"),
        "sums of bytes": ("128u * x.sums[row + r]", "127u * x.sums[row + r]", "avx512_bf16"),
        "scale of a row": ("x.scales[row + r]", "x.scales[row]", "avx512_bf16"),
        "sums of groups": ("-8u * x.sums[(row + r) * n_group + g]", "-8u * x.sums[(row + r) * n_group]", "avx512_bf16"),
        "zeros": ("weights + 576", "weights + 512", "avx512_bf16"),
        "bits of a row alone": (
            "_mm512_add_ps(sums[r][half], bias)",
            "sums[r][half] * (R > 3 ? 1.0000002f : 1) + bias",
            "avx512_bf16",
        ),
    },
    "noise": {
        "word": ("0xD2511F53", "0xD2511F51", ""),
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
