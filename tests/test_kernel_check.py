"""Kernels are checked before they are used, for each build and instruction set, and pass sanitizers."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from machine import needs_cpp_compiler
from programs import ROOT, python
from wrong_kernels import BUGS, compile_source, expected, write_source

from models import cpp_build, pointwise_cpp
from models.attention import gpu_check

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
    monkeypatch.setattr(cpp_build, "speedup", lambda rows, other: 1.0)
    pointwise_cpp.load_kernel.cache_clear()
    yield partial(monkeypatch.setattr, cpp_build, "BUILDS")
    pointwise_cpp.load_kernel.cache_clear()


def test_what_cannot_be_used_is_replaced_by_the_next_build(pointwise, monkeypatch, capfd):
    """Each with a line that says why; a later process does nothing but load it."""
    pointwise({name: ("-O0", f"-DBUG={bug}") for name, bug in (("crashing", -1), ("wrong", 1), ("right", 0))})
    pointwise_cpp.load_kernel()
    note = capfd.readouterr().err.strip().splitlines()[-1]
    assert all(word in note for word in ("crashing: ", "wrong: ", "the right build"))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("built or checked twice"))
    cpp_build.load_library("pointwise")


ROW = {"what": "", "error": 0.0, "allowed": 1.0}


@pytest.mark.parametrize("build", ["AVX2", "plain"])
@pytest.mark.parametrize("name", ["attention", "pointwise", "noise"])
def test_other_builds_are_right(name, build):
    library = ctypes.CDLL(str(cpp_build.build_library(name, build)))
    checked = suite(name)
    candidate = checked.candidate(library)
    assert [case.what for case in checked.cases() if not case.error(candidate) <= case.allowed] == []


@pytest.mark.slow
@pytest.mark.parametrize("build", cpp_build.BUILDS)
def test_sanitizers_find_nothing_over_random_shapes(tmp_path, build):
    flags = *SANITIZE, *cpp_build.BUILDS[build]
    libraries = [compile_source(write_source(name, tmp_path), *flags) for name in cpp_build.KERNELS]
    runtimes = (["g++", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
    paths = [subprocess.run(find, capture_output=True, text=True).stdout.strip() for find in runtimes]
    environment = {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    ended = python(ROOT / "tests" / "random_shapes.py", *libraries, 150, **environment)
    assert ended.code == 0, ended.err[-3000:]


@pytest.mark.parametrize(
    "found,said,n_checks",
    [(([ROW], "wrong results"), "wrong results", 2), (([], "it crashes (SIGABRT)"), "it crashes (SIGABRT)", 3)],
)
def test_kernels_are_checked_once_on_each_gpu(monkeypatch, tmp_path, found, said, n_checks):
    """A check that crashed is repeated."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    gpus, checked = iter(["H100", "H100", "A100"]), []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(gpus))
    monkeypatch.setattr(gpu_check, "check", lambda *given: checked.append(given) or found)
    assert [gpu_check.refusal("triton", torch.device("cuda")) for _ in range(3)] == [said] * 3
    assert checked == [("models.attention.gpu_check", "triton")] * n_checks
