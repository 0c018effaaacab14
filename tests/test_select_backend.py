"""Which attention backend a model gets, and what is said about it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kv_cache.errors import ConfigError
from models.attention import AttentionSpec, TorchAttention, flash_backend, select_backend
from models.attention.flash_backend import FA2, FA3, Finding, Flavour

SPEC = AttentionSpec(32, 8, 128, None, torch.bfloat16)
FLOAT32 = AttentionSpec(32, 8, 128, None, torch.float32)


@pytest.fixture
def triton_device(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class NoDriver:
    @property
    def active(self):
        raise RuntimeError("Failed to find C compiler.")


@pytest.fixture
def no_compiler(triton_device, monkeypatch, tmp_path):
    """Nothing on PATH, and nothing that Triton built before."""
    monkeypatch.setattr("triton.runtime.driver", NoDriver())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC")


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


def executable(path: Path) -> str:
    path.touch(mode=0o755)
    return str(path)


@pytest.mark.parametrize("given,said", [(None, "gcc, clang"), ("/nowhere/gcc", "'/nowhere/gcc'"), ("", "''")])
def test_without_a_c_compiler_a_gpu_gets_torch_and_is_told(no_compiler, monkeypatch, tmp_path, given, said):
    """A CC that names nothing counts, whatever is on PATH: Triton looks no further."""
    if given is not None:
        monkeypatch.setenv("CC", given)
        executable(tmp_path / "gcc")
    chosen, why = select_backend("auto", "cuda", SPEC)
    assert isinstance(chosen, TorchAttention)
    assert why.startswith("triton is not available") and "C compiler" in why and said in why
    with pytest.raises(ConfigError, match=r"(?s)where: +--attention.*triton on cuda: .*C compiler.*--attention auto"):
        select_backend("triton", "cuda", SPEC)
    assert "head_dim" in select_backend("triton", "cuda", AttentionSpec(32, 8, 80, None, torch.bfloat16)).why


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_c_compiler_on_path_or_in_cc_will_do(no_compiler, monkeypatch, tmp_path, name):
    compiler = executable(tmp_path / name)
    assert select_backend("triton", "cuda", SPEC).backend.name == "triton"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", compiler)
    assert select_backend("triton", "cuda", SPEC).backend.name == "triton"


def test_no_c_compiler_is_needed_by_the_interpreter_or_for_a_launcher_built_before(no_compiler, monkeypatch):
    with monkeypatch.context() as interpreted:
        interpreted.setenv("TRITON_INTERPRET", "1")
        assert select_backend("triton", "cuda", SPEC).backend.name == "triton"
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active="a driver"))
    assert select_backend("triton", "cuda", SPEC).backend.name == "triton"


def test_flash_without_a_c_compiler_falls_back_on_torch(no_compiler, monkeypatch):
    flavour = Flavour(FA2, lambda *args, **kwargs: None, 132)
    monkeypatch.setattr(flash_backend, "find_flavour", lambda device: Finding(flavour, FA2.title))
    assert "on torch" in select_backend("flash", "cuda", SPEC).why


@pytest.mark.parametrize("name,device", [("triton", "cpu"), ("flash", "cpu"), ("cpp", "cuda")])
def test_a_backend_for_another_device_is_refused(name, device):
    with pytest.raises(ConfigError, match=f"{name} on {device}"):
        select_backend(name, device, SPEC)


@pytest.mark.parametrize("package", [FA2, FA3])
def test_flash_says_which_package_and_what_takes_over(triton_device, monkeypatch, package):
    flavour = Flavour(package, lambda *args, **kwargs: None, 132)
    monkeypatch.setattr(flash_backend, "find_flavour", lambda device: Finding(flavour, package.title))
    chosen, why = select_backend("flash", "cuda", SPEC)
    assert chosen.name == "flash" and package.title in why and "on triton" in why
    no_package(monkeypatch, "triton")
    assert "on torch" in select_backend("flash", "cuda", SPEC).why
    chosen, why = select_backend("flash", "cuda", FLOAT32)
    assert isinstance(chosen, TorchAttention) and "float32" in why


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="unknown attention backend"):
        select_backend("xformers", "cpu", SPEC)


def test_flash_without_a_package_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(ConfigError, match=r"FlashAttention-3.*FlashAttention-2"):
        select_backend("flash", "cuda", SPEC)
