"""The attention backend that `select_backend` chooses on each machine."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import PropertyMock

import pytest
import torch
from fake_flash_attn import fake_package

from common.errors import ConfigError
from models.attention import AttentionSpec, select_backend
from models.attention.flash_backend import FA2, FA3, FA3_FWD

PACKAGES = (FA3, FA3_FWD, FA2)
SPEC = AttentionSpec(32, 8, 128, None, torch.bfloat16)
WITHOUT_TRITON = {"has_triton": False}
NO_COMPILER = {"launch_error": subprocess.CalledProcessError(1, ["gcc", "main.c"])}


@pytest.fixture
def machine(monkeypatch):
    """Function that pretends to be a GPU with some flash packages, and with Triton, whose launcher may fail."""

    def pretend(capability=(9, 0), packages=(), has_triton=True, launch_error=None, refused=None):
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
    "name,model,on,chosen,reason",
    [
        ("auto", {}, {}, "triton", "Triton"),
        ("triton", {"head_dim": 80}, {}, "torch", "head_dim"),
        ("auto", {}, WITHOUT_TRITON, "torch", "triton"),
        ("auto", {}, NO_COMPILER, "torch", "gcc"),
        ("auto", {}, {"refused": {"triton": "wrong results"}}, "torch", "wrong results"),
        ("flash", {}, {"packages": PACKAGES, "refused": {"flash": "it crashes"}}, "triton", "it crashes"),
        ("flash", {}, {"packages": PACKAGES}, "flash", FA3.title),
        ("flash", {}, {"packages": (FA2,)}, "flash", FA2.title),
        ("flash", {}, {"capability": (8, 0), "packages": PACKAGES}, "flash", FA2.title),
        ("flash", {"dtype": torch.float32}, {"packages": (FA3,)}, "torch", "float32"),
        ("flash", {"sliding_window": 7}, {"packages": (FA2,)}, "triton", "sliding window"),
    ],
)
def test_the_best_backend_is_taken_with_a_reason(machine, name, model, on, chosen, reason):
    machine(**on)
    backend, why = select_backend(name, "cuda", replace(SPEC, **model))
    assert backend.name == chosen and "\n" not in why and reason in why


@pytest.mark.parametrize(
    "name,device,on",
    [
        ("triton", "cuda", WITHOUT_TRITON),
        ("triton", "cpu", {}),
        ("cpp", "cuda", {}),
        ("flash", "cpu", {"packages": PACKAGES}),
        ("flash", "cuda", {"capability": (7, 5), "packages": PACKAGES}),
        ("xformers", "cpu", {}),
    ],
)
def test_a_backend_that_is_not_there_is_refused(machine, name, device, on):
    machine(**on)
    with pytest.raises(ConfigError, match="--attention"):
        select_backend(name, device, SPEC)
