"""Which attention backend a model gets, and what is said about it."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import PropertyMock

import pytest
import torch
from programs import python

from common.errors import ConfigError
from models.attention import AttentionSpec, TorchAttention, flash_backend, select_backend
from models.attention.flash_backend import FA2, FA3, Flavour

SPEC = AttentionSpec(32, 8, 128, None, torch.bfloat16)
FLOAT32 = AttentionSpec(32, 8, 128, None, torch.float32)


@pytest.fixture
def triton_device(monkeypatch):
    """A GPU, and a driver whose launcher is built."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(utils="a launcher")))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def no_driver(error: Exception) -> object:
    """A driver that fails so when it is asked for its launcher."""
    return type("NoDriver", (), {"active": PropertyMock(side_effect=error)})()


@pytest.fixture
def no_launcher(triton_device, monkeypatch):
    monkeypatch.setattr("triton.runtime.driver", no_driver(RuntimeError("Failed to find C compiler.")))


@pytest.fixture
def nothing_built(triton_device, monkeypatch, tmp_path):
    """The driver of the installed Triton, as in a process that has a GPU and nothing in Triton's cache."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import DriverConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr("triton.runtime.driver", DriverConfig())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_importing_the_backends_imports_no_package():
    code = "import sys, models.attention, models.attention.flash_backend as flash\n"
    code += "packages = {package.module for package in (flash.FA2, flash.FA3, flash.FA3_FWD)}\n"
    code += "print((packages | {'models.attention.triton_backend'}) & set(sys.modules))"
    ended = python("-c", code)
    assert ended.out.strip() == "set()", ended.err


def no_package(monkeypatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "models.attention.triton_backend", raising=False)


def test_a_gpu_gets_triton(triton_device):
    chosen, why = select_backend("auto", "cuda", SPEC)
    assert chosen.name == "triton" and why.startswith("Triton 3")


@pytest.mark.parametrize("head_dim,dtype,said", [(80, torch.bfloat16, "head_dim"), (128, torch.float32, "float32")])
def test_shapes_that_triton_does_not_have_run_on_torch_whoever_asks(triton_device, head_dim, dtype, said):
    spec = AttentionSpec(32, 8, head_dim, None, dtype)
    for name in ("auto", "triton"):
        chosen, why = select_backend(name, "cuda", spec)
        assert isinstance(chosen, TorchAttention) and said in why


def test_without_triton_a_gpu_gets_torch_and_is_told(monkeypatch):
    no_package(monkeypatch, "triton")
    chosen, why = select_backend("auto", "cuda", SPEC)
    assert isinstance(chosen, TorchAttention) and "triton is not available" in why
    with pytest.raises(ConfigError, match="use --attention auto"):
        select_backend("triton", "cuda", SPEC)


@pytest.mark.parametrize(
    "error,said",
    [
        (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "'gcc', 'main.c'"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere/gcc"), "'/nowhere/gcc'"),
        (AssertionError("libcuda.so cannot found!\nPossible files are"), "libcuda.so cannot found!"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_without_a_launcher_a_gpu_gets_torch_and_is_told(triton_device, monkeypatch, error, said):
    monkeypatch.setattr("triton.runtime.driver", no_driver(error))
    chosen, why = select_backend("auto", "cuda", SPEC)
    assert isinstance(chosen, TorchAttention) and why.startswith("triton is not available")
    assert "C compiler" in why and "Python's headers" in why and said in why and "\n" not in why
    with pytest.raises(ConfigError, match=r"(?s)where: +--attention.*triton on cuda: .*C compiler.*--attention auto"):
        select_backend("triton", "cuda", SPEC)
    assert "head_dim" in select_backend("triton", "cuda", AttentionSpec(32, 8, 80, None, torch.bfloat16)).why


@pytest.mark.parametrize("compiler,said", [("false", "CalledProcessError"), ("/nowhere/gcc", "FileNotFoundError")])
def test_the_compiler_is_tried(nothing_built, monkeypatch, compiler, said):
    monkeypatch.setenv("CC", compiler)
    assert said in select_backend("auto", "cuda", SPEC).why


def test_the_interpreter_needs_no_launcher(no_launcher, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton", "cuda", SPEC).backend.name == "triton"


def with_flash(monkeypatch, package):
    found = Flavour(package, lambda *args, **kwargs: None, 132), package.title
    monkeypatch.setattr(flash_backend, "find_flavour", lambda device: found)


def test_flash_without_tritons_launcher_falls_back_on_torch(no_launcher, monkeypatch):
    with_flash(monkeypatch, FA2)
    assert "on torch" in select_backend("flash", "cuda", SPEC).why


def test_a_backend_for_another_device_or_an_unknown_one_is_refused():
    for name, device in (("triton", "cpu"), ("flash", "cpu"), ("cpp", "cuda")):
        with pytest.raises(ConfigError, match=f"{name} on {device}"):
            select_backend(name, device, SPEC)
    with pytest.raises(ConfigError, match="unknown attention backend"):
        select_backend("xformers", "cpu", SPEC)


@pytest.mark.parametrize("package", [FA2, FA3])
def test_flash_says_which_package_and_what_takes_over(triton_device, monkeypatch, package):
    with_flash(monkeypatch, package)
    chosen, why = select_backend("flash", "cuda", SPEC)
    assert chosen.name == "flash" and package.title in why and "on triton" in why
    no_package(monkeypatch, "triton")
    assert "on torch" in select_backend("flash", "cuda", SPEC).why
    chosen, why = select_backend("flash", "cuda", FLOAT32)
    assert isinstance(chosen, TorchAttention) and "float32" in why


def test_flash_without_a_package_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(ConfigError, match=r"FlashAttention-3.*FlashAttention-2"):
        select_backend("flash", "cuda", SPEC)
