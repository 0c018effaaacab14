"""Kernels are checked before they are used: a wrong build is found, and the next right build takes its place. Tiles of
AMX are emulated on any CPU with AVX512-BF16, and real where the CPU has them."""

import os
import platform
import subprocess
from functools import cache, partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import check as attention_check
from models.attention.select import refusal
from models.kernels import build as cpp_build
from models.kernels import linear_check, linear_cpp
from models.kernels.check import Case
from models.kernels.packed_linear import PackedLinear
from models.kernels.row_bits import CHUNK
from tests.support.machine import needs_bfloat16_products, needs_cpp_compiler, needs_vnni
from tests.support.programs import run_here

pytestmark = needs_cpp_compiler
needs_amx = pytest.mark.skipif(
    "AMX" not in cpp_build.builds_of(cpp_build.KERNELS["attention"]), reason="this CPU has no AMX"
)
# An expression of the pointwise kernel's source, and what a bug makes of it.
RIGHT, WRONG = "sum_of_lanes(squares) / dim", "sum_of_lanes(squares) / (dim + 1)"
EMULATED = ("-march=native", "-DAMX", "-DEMULATED")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(autouse=True)
def emulated(monkeypatch) -> None:
    """Kernels for AMX with tiles in plain C++, for any CPU."""
    monkeypatch.setitem(cpp_build.BUILDS, "emulated AMX", EMULATED)
    for name, flags in (("AMX", EMULATED), ("widened", cpp_build.BUILDS["widened"])):
        monkeypatch.setitem(cpp_build.BUILDS, f"sanitized {name}", (*flags, *SANITIZED))


@cache
def cases_of(name: str) -> list[Case]:
    suite: Any = import_module(cpp_build.KERNELS[name].cases)
    return [*suite.cases()]


@pytest.mark.parametrize(
    "name,build",
    [
        *product(("pointwise", "noise", "filter"), ("native", "AVX2", "plain")),
        *product(("attention",), ("native", "plain", "emulated AMX")),
        ("linear", "AVX2"),
        *(
            pytest.param(name, build, marks=needs_bfloat16_products)  # elsewhere these are the native build, or AVX2's
            for name, builds in (("attention", ("AVX2", "widened")), ("linear", ("native", "widened", "emulated AMX")))
            for build in builds
        ),
    ],
)
def test_builds_are_right(name, build):
    suite: Any = import_module(cpp_build.KERNELS[name].cases)
    candidate = suite.candidate(cpp_build.open_library(cpp_build.build_library(name, build)))
    assert [case.what for case in cases_of(name) if not case.error(candidate) <= case.allowed] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("name", ["attention", "linear", "pointwise", "noise", "filter"])
@pytest.mark.parametrize("flag", ["-march=skylake-avx512", "-DNATIVE", "-DAMX", "-DWIDENED"])
def test_kernels_compile_for_cpus_with_avx512(name: str, flag: str) -> None:
    """This CPU may lack the instructions."""
    command = ["g++", *cpp_build.COMPILE, "-march=sapphirerapids", flag, "-fsyntax-only"]
    source = cpp_build.KERNELS[name].source
    assert subprocess.run([*command, str(source)], cwd=cpp_build.ROOT, capture_output=True).returncode == 0


def attention_of(build: str, storage: torch.dtype) -> list[Tensor]:
    """Return what a build computes from bfloat16 queries over entries of a dtype."""
    backend = attention_check.candidate(cpp_build.open_library(cpp_build.build_library("attention", build)))
    shapes = product((*attention_check.SHAPES, *attention_check.PADDED_SHAPES), attention_check.BLOCKS[:2])
    cases = (attention_check.cases_of(torch.bfloat16, storage, *of)[0] for of in shapes)
    return [result for case in cases for result in case.compute(backend)]


@cache
def function_of(build: str) -> Any:
    return linear_cpp.function_of(cpp_build.open_library(cpp_build.build_library("linear", build)))


def product_of(build: str, layer: linear_check.Layer, x: Tensor) -> Tensor:
    return linear_cpp.linear(x, layer.packed, layer.bits, linear_check.D_OUT, layer.scale, None, function_of(build))


def layer_and_rows(bits: int, n_row: int) -> tuple[linear_check.Layer, Tensor]:
    x = torch.randn(n_row, linear_check.D_IN, generator=torch.Generator().manual_seed(n_row)).bfloat16()
    return next(layer for layer in linear_check.layers() if layer.bits == bits), x


@needs_bfloat16_products
@pytest.mark.parametrize("n_row", [15, 16, 17, 31, 32, 48, 97, 130])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_row_in_tiles_has_the_bits_that_it_has_alone(bits, n_row):
    """Rows share tiles, groups of tiles, and panels with a few rows after the last full one."""
    layer, x = layer_and_rows(bits, n_row)
    some = sorted({0, n_row // 2, n_row - 1})
    alone = torch.cat([product_of("emulated AMX", layer, x[row, None]) for row in some])
    assert torch.equal(product_of("emulated AMX", layer, x)[some], alone)


def products_of(build: str, bits: int) -> list[Tensor]:
    return [product_of(build, *layer_and_rows(bits, n_row)) for n_row in (1, 37)]


# A function with its argument, and two builds. A CPU with AMX compares its tiles with their emulation.
ALIKE: list[Any] = [
    pytest.param(attention_of, torch.int8, "emulated AMX", "native", marks=needs_vnni),
    pytest.param(products_of, 8, "emulated AMX", "native", marks=needs_bfloat16_products),
]
AMX_LIKE = (attention_of, torch.bfloat16), (attention_of, torch.int8), (products_of, 16)
ALIKE += [pytest.param(*of, "AMX", "emulated AMX", marks=needs_amx) for of in AMX_LIKE]


@pytest.mark.parametrize("compute,kind,build,other", ALIKE)
def test_builds_that_add_up_alike_have_the_same_bits(compute, kind, build, other):
    assert all(map(torch.equal, compute(build, kind), compute(other, kind)))


@needs_bfloat16_products
def test_chunks_of_prompts_are_multiplied_by_onednn_on_a_cpu_with_amx(monkeypatch):
    """A bias, which the kernel takes in float32, is added in either."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(linear_cpp, "choose", lambda name: SimpleNamespace(build="AMX"))
    monkeypatch.setattr(linear_cpp, "linear", partial(linear_cpp.linear, function=function_of("emulated AMX")))
    weight, x = torch.randn(64, 96).bfloat16(), torch.randn(CHUNK, 96).bfloat16()
    layer, in_onednn = PackedLinear(weight, weight[:, 0]), []
    monkeypatch.setattr(layer, "multiply", lambda x: in_onednn.append(len(x)) or PackedLinear.multiply(layer, x))
    rows, chunk, wanted = layer(x[:-1]), layer(x), torch.nn.functional.linear(x, weight, weight[:, 0])
    assert in_onednn == [CHUNK]
    assert (rows - wanted[:-1]).abs().max() <= 0.1 >= (chunk - wanted).abs().max()
    monkeypatch.setattr(linear_cpp, "choose", lambda name: SimpleNamespace(build="native"))
    assert PackedLinear(weight, None).kernel_weight is None, "without tiles of its own"


@pytest.mark.slow
@pytest.mark.parametrize("build", ["AMX", "widened"])
@pytest.mark.parametrize("name", ["attention", pytest.param("linear", marks=needs_bfloat16_products)])
def test_sanitizers_find_nothing(monkeypatch, name, build):
    """In a process that starts with the sanitizers' library."""
    library = cpp_build.build_library(name, f"sanitized {build}")
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    asked = [[*cpp_build._compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    files = [subprocess.check_output(command, text=True).strip() for command in asked]
    monkeypatch.setenv("LD_PRELOAD", os.pathsep.join(files))
    assert cpp_build.check(cpp_build.KERNELS[name].cases, str(library)) is None


@pytest.fixture
def builds(monkeypatch, tmp_path) -> partial:
    """Choose among builds of a pointwise kernel with a bug that -DBUG=0 turns off, in an empty cache folder:
    `builds({name: flags})`. With -DBUG=2, it refuses this machine."""
    kernel, source = cpp_build.KERNELS["pointwise"], tmp_path / "pointwise.cpp"
    text = kernel.source.read_text()
    assert RIGHT in text
    refusal = 'extern "C" const char* foretoken_refusal() { return BUG == 2 ? "no permission" : nullptr; }'
    source.write_text(text.replace(RIGHT, f"(BUG ? ({WRONG}) : ({RIGHT}))") + refusal)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(cpp_build.KERNELS, "pointwise", kernel._replace(source=source))
    monkeypatch.setattr(cpp_build, "load_library", cpp_build.load_library.__wrapped__)
    return partial(monkeypatch.setattr, cpp_build, "BUILDS")


def test_a_build_that_cannot_be_used_is_replaced_by_the_next_one(builds, monkeypatch, capfd):
    """A later process loads the build that was chosen, without checks. Checks run in this process."""
    monkeypatch.setattr(subprocess, "run", run_here)
    builds({name: ("-O0", f"-DBUG={bug}") for name, bug in (("wrong", 1), ("refused", 2), ("right", 0))})
    cpp_build.load_library("pointwise")
    note = capfd.readouterr().err.strip().splitlines()[-1]
    assert all(word in note for word in ("wrong: ", "refused: no permission", "the right build"))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))
    cpp_build.load_library("pointwise")


@pytest.mark.parametrize("stored", ["", '{"build": "na', "[]", "{}"])
def test_a_damaged_choice_is_made_again(tmp_path, stored):
    memory, choices = tmp_path / "kernel.json", [cpp_build.BuildChoice("right", [])]
    memory.write_text(stored)
    assert cpp_build.remembered(memory, "", choices.pop) == cpp_build.remembered(memory, "", choices.pop)


def test_a_kernel_of_a_gpu_is_checked_once_on_each_if_it_is_right(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    gpus, checked = iter(["H100", "H100", "A100", "A100"]), []
    problems = iter([None, "it crashes (SIGABRT)", None])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: next(gpus))
    monkeypatch.setattr(cpp_build, "check", lambda *given: checked.append(given) or next(problems))
    assert [refusal("triton") for _ in range(4)] == [None, None, "triton: it crashes (SIGABRT)", None]
    assert checked == [("models.attention.check", "triton")] * 3


def test_the_widened_build_is_used_if_it_is_right_and_clearly_faster(monkeypatch):
    monkeypatch.setattr(cpp_build, "_cpu", lambda: "flags : avx512_bf16")
    monkeypatch.setattr(cpp_build, "build_library", lambda name, build: build)
    ends = {("native",): (None, ""), ("widened",): (None, "")}
    monkeypatch.setattr(cpp_build, "_run_cases", lambda module, *candidates: ends[candidates])
    for timed, build in (((None, "1.2"), "widened"), ((None, "1.05"), "native"), (("it crashes", ""), "native")):
        ends["native", "widened"] = timed
        assert cpp_build._first_good_build("attention").build == build
    assert cpp_build._first_good_build("pointwise").build == "native", "it does not multiply bfloat16"
    ends["native", "widened"], ends["widened",] = (None, "2.0"), ("wrong results", "")
    assert cpp_build._first_good_build("attention") == cpp_build.BuildChoice("native", [])
