"""What the check of kernels finds, what is used then, and kernels under sanitizers and other instruction sets."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from machine import needs_cpp_compiler
from programs import ROOT, Ended, python
from wrong_kernels import BUGS, compile_source, expected, write_source

from models import cpp_build, pointwise_cpp
from models.attention import AttentionSpec, cpp_backend, gpu_check, select_backend

pytestmark = needs_cpp_compiler
SANITIZE = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"


def suite(name: str) -> Any:
    return import_module(cpp_build.KERNELS[name][1])


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_is_found(name, tmp_path):
    library, checked, found = (
        ctypes.CDLL(str(compile_source(write_source(name, tmp_path), *cpp_build.BUILDS["native"]))),
        suite(name),
        {},
    )
    cases, candidate = list(checked.cases()), checked.candidate(library)
    for number, bug in {0: "none", **expected(name)}.items():
        ctypes.c_int.in_dll(library, "foretoken_bug").value = number
        found[bug] = next((case.what for case in cases if not case.error(candidate) <= case.allowed), None)
    assert {bug for bug, what in found.items() if what is None} == {"none"}


@pytest.fixture
def pointwise(monkeypatch, tmp_path) -> partial:
    """Chooses among builds of the pointwise kernel with bugs, in a cache folder of its own: `pointwise(name=flags)`."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    kernel = write_source("pointwise", tmp_path), cpp_build.KERNELS["pointwise"][1]
    monkeypatch.setitem(cpp_build.KERNELS, "pointwise", kernel)
    monkeypatch.setattr(cpp_build, "speedup", lambda rows: 1.0)
    pointwise_cpp.load_kernel.cache_clear()
    yield partial(monkeypatch.setattr, cpp_build, "BUILDS")
    pointwise_cpp.load_kernel.cache_clear()


def test_what_cannot_be_used_is_replaced_by_the_next_build(pointwise, monkeypatch, capfd):
    """Each with a line that says why; a later process does nothing but load it."""
    pointwise({"unknown": ("-march=unknown",), "crashing": ("-DBUG=-1",), "wrong": ("-DBUG=1",), "right": ("-O1",)})
    pointwise_cpp.load_kernel()
    note = capfd.readouterr().err.strip().splitlines()[-1]
    assert note.startswith("note: the right build of the pointwise kernel is used: unknown: ")
    said = (
        "g++ cannot build it: ",
        "; crashing: it crashes (SIGILL); wrong: wrong results (bfloat16, add_norm: an error of",
    )
    assert [words for words in said if words not in note] == []
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        cpp_build.load_library("pointwise")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02
    assert {path.suffix for path in cpp_build.cache_folder().iterdir()} == {".so", ".json", ".lock"}


def test_without_a_right_build_functions_run_eagerly(pointwise, monkeypatch, capfd):
    """A refusal is remembered, too."""
    pointwise({"wrong": ("-DBUG=5",)})
    for _ in range(2):
        with pytest.raises(cpp_build.BuildError, match=r"^wrong: wrong results \(bfloat16, swiglu: an error of"):
            pointwise_cpp.cpp()
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))


ROW = {"what": "", "error": 0.0, "allowed": 1.0}


@pytest.mark.parametrize(
    "times,used,said",
    [
        ({"native": 1, "AVX2": 2}, "native", ""),
        ({"native": 1, "AVX2": 0.95}, "native", ""),
        ({"native": 2, "AVX2": 1, "plain": 3}, "AVX2", "native: AVX2 is 2.0 times as fast"),
        ({"native": 2, "AVX2": 1, "plain": 0.5}, "plain", "AVX2: plain is 2.0 times as fast"),
        ({"native": 27, "AVX2": 36}, None, "native: PyTorch is 3.0 times as fast"),
    ],
)
def test_a_build_is_replaced_by_a_faster_one(monkeypatch, tmp_path, times, used, said):
    """Attention is then PyTorch's, which is said where backends are chosen."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    cpp_backend.load_kernel.cache_clear()
    monkeypatch.setattr(cpp_build, "build_library", lambda name, build: tmp_path / build)
    of = {str(tmp_path / build): [ROW | {"ms": ms, "pytorch_ms": 9}] for build, ms in times.items()}
    monkeypatch.setattr(cpp_build, "check", lambda module, library: (of[library], None))
    choice = cpp_build.choose("attention")
    assert choice.build == used and (choice.refused or [""])[-1] == said and [*choice.checked] == [*times]
    if used is None:
        spec = AttentionSpec(6, 2, 64, None, torch.float32)
        assert select_backend("auto", "cpu", spec).why == f"cpp is not available: {said}"


@pytest.mark.parametrize("build", ["AVX2", "plain"])
@pytest.mark.parametrize("name", ["attention", "pointwise", "noise"])
def test_other_builds_are_right(name, build):
    library = ctypes.CDLL(str(cpp_build.build_library(name, build)))
    checked = suite(name)
    candidate = checked.candidate(library)
    assert [case.what for case in checked.cases() if not case.error(candidate) <= case.allowed] == []


def test_the_command_prints_what_was_found():
    ended = python("-m", "models.attention")
    assert ended.code == 0 and "attention: " in ended.out.splitlines()[-4], ended.err


@pytest.fixture
def shapes(tmp_path) -> Callable[..., Ended]:
    """Runs kernels over random shapes in a process with sanitizers: `shapes(n_shape, build, bug)`."""

    def run(n_shape: int, build: str, *bug: int) -> Ended:
        flags = *SANITIZE, *cpp_build.BUILDS[build]
        libraries = [compile_source(write_source(name, tmp_path), *flags) for name in cpp_build.KERNELS]
        runtimes = (["g++", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
        paths = [subprocess.run(find, capture_output=True, text=True).stdout.strip() for find in runtimes]
        own = {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
        return python(ROOT / "tests" / "random_shapes.py", *libraries, n_shape, *bug, **own)

    return run


@pytest.mark.parametrize(
    "build,n_shape", [("native", 12), *(pytest.param(build, 150, marks=pytest.mark.slow) for build in cpp_build.BUILDS)]
)
def test_sanitizers_find_nothing(shapes, build, n_shape):
    ended = shapes(n_shape, build)
    assert ended.code == 0, ended.err[-3000:]


@pytest.mark.slow
def test_sanitizers_find_a_kernel_that_reads_too_far(shapes):
    assert "AddressSanitizer: heap-buffer-overflow" in shapes(12, "native", 1 + [*BUGS["attention"]].index("tail")).err


def test_wrong_kernels_for_a_gpu_are_found_and_right_ones_are_not():
    """In Triton's interpreter: masks, and the running softmax."""
    pytest.importorskip("triton")
    bugs = 'scores = tl.where(visible, scores, float("-inf"))', "scores += 0", "acc * decay[:, None]", "acc"
    ended = python(ROOT / "tests/gpu_check_cases.py", *bugs, TRITON_INTERPRET="1")
    assert ended.code == 0, ended.err
    *wrong, right = ended.out.splitlines()
    assert right == "right" and len(wrong) == 2 and "right" not in wrong


@pytest.mark.parametrize(
    "found,said,n_checks",
    [
        (([ROW], None), None, 2),
        (([ROW], "wrong results"), "wrong results", 2),
        (([], "it crashes (SIGABRT)"), "it crashes (SIGABRT)", 3),
    ],
)
def test_kernels_for_a_gpu_are_checked_once(monkeypatch, tmp_path, found, said, n_checks):
    """For each GPU; what was found is remembered, but not a check that came to no end."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    gpus, checked = iter(["H100", "H100", "A100"]), []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(gpus))
    monkeypatch.setattr(gpu_check, "check", lambda *given: checked.append(given) or found)
    assert [gpu_check.refusal("triton", torch.device("cuda")) for _ in range(3)] == [said] * 3
    assert checked == [("models.attention.gpu_check", "triton")] * n_checks
