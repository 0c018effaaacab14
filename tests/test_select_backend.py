"""Which attention backend a model gets on which machine, and what is said about it."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import PropertyMock

import pytest
import torch
from fake_flash_attn import fake_package
from programs import python

from common.errors import ConfigError
from models.attention import AttentionSpec, select_backend
from models.attention.flash_backend import FA2, FA3, FA3_FWD

PACKAGES = (FA3, FA3_FWD, FA2)
SPEC = AttentionSpec(32, 8, 128, None, torch.bfloat16)
WITHOUT_TRITON = {"has_triton": False}
# What Triton's driver fails with when it is asked for its launcher, and what is said of it.
LAUNCH_ERRORS = (
    (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
    (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "'gcc', 'main.c'"),
    (FileNotFoundError(2, "No such file or directory", "/nowhere/gcc"), "'/nowhere/gcc'"),
    (AssertionError("libcuda.so cannot found!\nPossible files are"), "libcuda.so cannot found!"),
    (RuntimeError(), "RuntimeError"),
)
NO_COMPILER = {"launch_error": LAUNCH_ERRORS[0][0]}


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a GPU with some flash packages, and with Triton, whose launcher may fail, or without."""

    def pretend(
        capability=(9, 0), packages=(), has_triton=True, launch_error=None, refused: dict[str, str] | None = None
    ):
        refused = refused or {}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("models.attention.select.refusal", lambda name, device: refused.get(name))
        for package in PACKAGES:
            # None in sys.modules is what importing an absent module looks like, wherever the tests run.
            monkeypatch.setitem(sys.modules, package.module, fake_package(package) if package in packages else None)
        if has_triton:
            pytest.importorskip("triton")
            active = PropertyMock(return_value=SimpleNamespace(utils="a launcher"), side_effect=launch_error)
            monkeypatch.setattr("triton.runtime.driver", type("Driver", (), {"active": active})())
        else:
            monkeypatch.setitem(sys.modules, "triton", None)
            monkeypatch.delitem(sys.modules, "models.attention.triton_backend", raising=False)

    return pretend


@pytest.mark.parametrize(
    "name,model,on,chosen,words",
    [
        ("auto", {}, {}, "triton", ["Triton 3"]),
        *((name, {"head_dim": 80}, {}, "torch", ["head_dim"]) for name in ("auto", "triton")),
        *((name, {"dtype": torch.float32}, {}, "torch", ["float32"]) for name in ("auto", "triton")),
        ("auto", {}, WITHOUT_TRITON, "torch", ["triton is not available"]),
        *(
            ("auto", {}, {"launch_error": error}, "torch", ["triton is not", "C compiler", "Python's headers", said])
            for error, said in LAUNCH_ERRORS
        ),
        ("triton", {"head_dim": 80}, NO_COMPILER, "torch", ["head_dim"]),
        ("auto", {}, {"refused": {"triton": "wrong results"}}, "torch", ["triton is not available: wrong results"]),
        ("flash", {}, {"packages": PACKAGES, "refused": {"flash": "it crashes"}}, "triton", ["it crashes"]),
        *(
            ("flash", {}, {"capability": at, "packages": found}, "flash", [best.title, best.module, "on triton"])
            for at, found, best in (
                ((9, 0), PACKAGES, FA3),
                ((9, 0), (FA3_FWD, FA2), FA3_FWD),
                ((9, 0), (FA2,), FA2),
                ((8, 0), PACKAGES, FA2),
                ((10, 0), PACKAGES, FA2),
            )
        ),
        ("flash", {}, {"packages": PACKAGES, **WITHOUT_TRITON}, "flash", ["on torch"]),
        ("flash", {}, {"packages": PACKAGES, **NO_COMPILER}, "flash", ["on torch"]),
        *(
            ("flash", model, {"packages": (package,)}, fallback, [said])
            for package, model, fallback, said in (
                (FA3, {"dtype": torch.float32}, "torch", "the model is in torch.float32"),
                (FA2, {"dtype": torch.float64}, "torch", "takes torch.float16 or torch.bfloat16"),
                (FA3_FWD, {"dtype": torch.float16}, "triton", "fa3-fwd takes torch.bfloat16, the model is in"),
                (FA2, {"head_dim": 264}, "torch", "head dims up to 256"),
                (FA3, {"head_dim": 100}, "torch", "multiples of 8, the model's is 100"),
                (FA2, {"sliding_window": 7}, "triton", "FlashAttention-2 cannot apply the model's sliding window of 7"),
                (FA3_FWD, {"sliding_window": 7}, "triton", "cannot apply"),
            )
        ),
    ],
)
def test_the_best_backend_is_taken_and_it_is_said_why(machine, name, model, on, chosen, words):
    machine(**on)
    backend, why = select_backend(name, "cuda", replace(SPEC, **model))
    assert backend.name == chosen and "\n" not in why
    assert [word for word in words if word not in why] == []


@pytest.mark.parametrize(
    "name,device,on,said",
    [
        ("triton", "cuda", WITHOUT_TRITON, "use --attention auto"),
        ("triton", "cuda", NO_COMPILER, "(?s)where: +--attention.*triton on cuda: .*C compiler.*--attention auto"),
        ("triton", "cpu", {}, "triton on cpu"),
        ("cpp", "cuda", {}, "cpp on cuda"),
        ("flash", "cpu", {"packages": PACKAGES}, "flash on cpu: .* a CUDA device, not cpu"),
        ("flash", "cuda", {"capability": (7, 5), "packages": PACKAGES}, "this device has 7.5"),
        ("flash", "cuda", {}, r"imported: FlashAttention-3.*fa3-fwd \(fa3_fwd_interface\): .*FlashAttention-2 \(flash"),
        ("flash", "cuda", {"capability": (8, 6), "packages": (FA3, FA3_FWD)}, "no flash .*imported: FlashAttention-2"),
        ("xformers", "cpu", {}, "unknown attention backend"),
    ],
)
def test_a_backend_that_is_not_there_is_refused(machine, name, device, on, said):
    machine(**on)
    with pytest.raises(ConfigError, match=said):
        select_backend(name, device, SPEC)


def test_a_package_that_is_too_old_is_passed_over(machine, monkeypatch):
    machine(packages=(FA2,))
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_with_kvcache")
    with pytest.raises(ConfigError, match="has no attribute 'flash_attn_with_kvcache'"):
        select_backend("flash", "cuda", SPEC)


def test_the_interpreter_needs_no_launcher(machine, monkeypatch):
    machine(**NO_COMPILER)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton", "cuda", SPEC).backend.name == "triton"


@pytest.mark.parametrize("compiler,said", [("false", "CalledProcessError"), ("/nowhere/gcc", "FileNotFoundError")])
def test_the_compiler_is_tried(machine, monkeypatch, tmp_path, compiler, said):
    """By the driver of the installed Triton, as in a process that has a GPU and nothing in Triton's cache."""
    machine()
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import DriverConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr("triton.runtime.driver", DriverConfig())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert said in select_backend("auto", "cuda", SPEC).why


def test_importing_the_backends_imports_no_package():
    code = "import sys, models.attention, models.attention.flash_backend as flash\n"
    code += "packages = {package.module for package in (flash.FA2, flash.FA3, flash.FA3_FWD)}\n"
    code += "print((packages | {'models.attention.triton_backend'}) & set(sys.modules))"
    ended = python("-c", code)
    assert ended.out.strip() == "set()", ended.err
