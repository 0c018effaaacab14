"""What the check of kernels finds, what is used then, and kernels under sanitizers and other instruction sets."""

from __future__ import annotations

import ctypes
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from machine import needs_cpp_compiler
from programs import ROOT, python
from wrong_kernels import BUGS, compile_source, write_source

from models import cpp_build, kernel_check, pointwise_cpp
from models.attention import AttentionSpec, cpp_backend, select_backend

pytestmark = needs_cpp_compiler
SANITIZE = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"


def refused(name: str, library: Path) -> dict[int, str]:
    """The bugs, by their numbers, with which the check refuses a kernel, and the input that showed it."""
    make_cases, of_library, _ = kernel_check.KERNELS[name]
    cases, loaded, found = list(make_cases()), ctypes.CDLL(str(library)), {}
    for number in range(len(BUGS[name]) + 1):
        ctypes.c_int.in_dll(loaded, "foretoken_bug").value = number
        wrong = (case.what for case in cases if not case.error(of_library(loaded)) <= case.allowed)
        if what := next(wrong, None):
            found[number] = what
    return found


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_is_found(name, tmp_path):
    library = compile_source(write_source(name, tmp_path))
    assert {*refused(name, library)} == {*range(1, len(BUGS[name]) + 1)}, list(BUGS[name])


@pytest.fixture
def pointwise(monkeypatch, tmp_path) -> partial:
    """Chooses among builds of the pointwise kernel with bugs, in a cache folder of its own: `pointwise(name=flags)`."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(cpp_build.SOURCES, "pointwise", write_source("pointwise", tmp_path))
    pointwise_cpp.load_kernel.cache_clear()
    yield partial(monkeypatch.setattr, cpp_build, "BUILDS")
    pointwise_cpp.load_kernel.cache_clear()


def test_what_cannot_be_used_is_replaced_by_the_next_build(pointwise, monkeypatch, capfd):
    """Each with a line that says why; a later process does nothing but load it."""
    pointwise({"unknown": ("-march=unknown",), "crashing": ("-DBUG=-1",), "wrong": ("-DBUG=1",), "right": ("-O1",)})
    pointwise_cpp.load_kernel()
    note = capfd.readouterr().err.strip().splitlines()[-1]
    assert note.startswith("note: the right build of the pointwise kernel is used: unknown: g++ cannot build it: ")
    assert "crashing: it crashes (SIGILL); wrong: wrong results (bfloat16, add_norm: an error of " in note
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))
    start = time.perf_counter()
    assert cpp_build.choose("pointwise").build == "right"
    cpp_build.load_library("pointwise")
    assert time.perf_counter() - start < 0.02


def test_without_a_right_build_functions_run_eagerly(pointwise, monkeypatch, capfd):
    """Which is remembered, too."""
    pointwise({"wrong": ("-DBUG=5",)})
    for _ in range(2):
        with pytest.raises(cpp_build.BuildError, match=r"^wrong: wrong results \(bfloat16, swiglu: an error of"):
            pointwise_cpp.cpp()
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))


ROW = {"what": "", "error": 0.0, "allowed": 1.0}


@pytest.mark.parametrize(
    "times,used,said",
    [
        ({"native": [1, 9], "AVX2": [2, 1, 9]}, "native", ""),
        ({"native": [1, 9], "AVX2": [0.95, 1, 9]}, "native", ""),
        ({"native": [2, 9], "AVX2": [1, 2, 9], "plain": [3, 1, 9]}, "AVX2", "native: AVX2 is 2.0 times as fast"),
        ({"native": [2, 9], "AVX2": [1, 2, 9], "plain": [0.5, 1, 9]}, "plain", "AVX2: plain is 2.0 times as fast"),
        ({"native": [3, 1], "AVX2": [4, 3, 1]}, None, "native: PyTorch is 3.0 times as fast"),
    ],
)
def test_a_build_is_replaced_by_a_faster_one(monkeypatch, tmp_path, times, used, said):
    """And attention by PyTorch's, which is said where backends are chosen."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    cpp_backend.load_kernel.cache_clear()
    monkeypatch.setattr(cpp_build, "build_library", lambda name, build: tmp_path / build)
    of = {str(tmp_path / build): [ROW | {"ms": ms}] for build, ms in times.items()}
    monkeypatch.setattr(cpp_build, "check", lambda name, *libraries: (of[libraries[0]], None))
    choice = cpp_build.choose("attention")
    assert choice.build == used and (choice.refused or [""])[-1] == said and [*choice.checked] == [*times]
    if used is None:
        spec = AttentionSpec(6, 2, 64, None, kernel_check.DTYPES[0])
        assert select_backend("auto", "cpu", spec).why == f"cpp is not available: {said}"


@pytest.mark.parametrize("build", ["AVX2", "plain"])
@pytest.mark.parametrize("name", BUGS)
def test_other_builds_are_right(name, build):
    library = ctypes.CDLL(str(cpp_build.build_library(name, build)))
    make_cases, of_library, _ = kernel_check.KERNELS[name]
    candidate = of_library(library)
    assert [case.what for case in make_cases() if not case.error(candidate) <= case.allowed] == []


def test_the_command_prints_what_was_found():
    ended = python("-m", "models.attention")
    assert ended.code == 0 and "attention: the " in ended.out.splitlines()[-2], ended.err


def test_shapes_under_sanitizers(tmp_path):
    run_sanitized(tmp_path, "-O0", 12)


@pytest.mark.slow
@pytest.mark.parametrize("flags", cpp_build.BUILDS.values())
def test_many_shapes_under_sanitizers(tmp_path, flags):
    run_sanitized(tmp_path, "-O2", 150, *flags)


def run_sanitized(folder: Path, optimise: str, n_shape: int, *flags: str) -> None:
    """Nothing is found in kernels as they are, and a bug that reads too far is: the sanitizers work."""
    libraries = [compile_source(write_source(name, folder), *SANITIZE, *flags, optimise) for name in BUGS]
    runtimes = (f"lib{name}.so" for name in ("asan", "ubsan"))
    paths = [subprocess.run(["g++", f"-print-file-name={one}"], capture_output=True, text=True) for one in runtimes]
    own = {"LD_PRELOAD": " ".join(path.stdout.strip() for path in paths), "ASAN_OPTIONS": "detect_leaks=0"}
    run = partial(python, ROOT / "tests" / "random_shapes.py", *libraries, OMP_NUM_THREADS="2", **own)
    ended = run(n_shape)
    assert ended.code == 0, ended.err[-3000:]
    tail = 1 + [*BUGS["attention"]].index("tail")
    assert "AddressSanitizer: heap-buffer-overflow" in run(n_shape, tail).err
