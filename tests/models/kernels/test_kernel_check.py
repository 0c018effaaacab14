"""Kernels are checked before they are used: a wrong build is found, and the next right build takes its place."""

import ctypes
import subprocess
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from models.attention.select import refusal
from models.kernels import build as cpp_build
from tests.support.machine import needs_cpp_compiler

pytestmark = needs_cpp_compiler
# An expression of the pointwise kernel's source, and what a bug makes of it.
RIGHT, WRONG = "sum_of_lanes(squares) / dim", "sum_of_lanes(squares) / (dim + 1)"


def errors(name: str, library: Path | str) -> list[str]:
    suite: Any = import_module(cpp_build.KERNELS[name].cases)
    candidate = suite.candidate(ctypes.CDLL(str(library)))
    return [case.what for case in suite.cases() if not case.error(candidate) <= case.allowed]


@pytest.mark.parametrize(
    "name,build", [*product(("attention", "pointwise", "noise"), ("native", "plain")), ("attention", "AVX2")]
)
def test_builds_are_right(name, build):
    assert errors(name, cpp_build.build_library(name, build)) == []


@pytest.fixture
def builds(monkeypatch, tmp_path) -> partial:
    """Choose among builds of a pointwise kernel with a bug that -DBUG=0 turns off, in an empty cache folder:
    `builds({name: flags})`."""
    kernel, source = cpp_build.KERNELS["pointwise"], tmp_path / "pointwise.cpp"
    text = kernel.source.read_text()
    assert RIGHT in text
    source.write_text(text.replace(RIGHT, f"(BUG ? ({WRONG}) : ({RIGHT}))"))
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(cpp_build.KERNELS, "pointwise", kernel._replace(source=source))
    monkeypatch.setattr(cpp_build, "load_library", cpp_build.load_library.__wrapped__)
    return partial(monkeypatch.setattr, cpp_build, "BUILDS")


def test_a_build_that_cannot_be_used_is_replaced_by_the_next_one(builds, monkeypatch, capfd):
    """A later process loads the build that was chosen, without checks."""
    builds({name: ("-O0", f"-DBUG={bug}") for name, bug in (("wrong", 1), ("right", 0))})
    cpp_build.load_library("pointwise")
    note = capfd.readouterr().err.strip().splitlines()[-1]
    assert all(word in note for word in ("wrong: ", "the right build"))
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
