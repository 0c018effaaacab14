"""Which attention backend a model gets, and what is said about it."""

from __future__ import annotations

import sys
from types import ModuleType

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
