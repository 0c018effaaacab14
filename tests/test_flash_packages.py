"""Which flash package a device gets, what is said where it has none, and that the stand-ins refuse what they refuse."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_flash_attn import fake_package

from models.attention.base import AttentionSpec
from models.attention.flash_backend import FA2, FA3, FA3_FWD, Flavour, find_flavour

PACKAGES = (FA3, FA3_FWD, FA2)


@pytest.mark.parametrize(
    "package,change,reason",
    [
        (FA3, {"dtype": torch.float32}, "the model is in torch.float32"),
        (FA2, {"dtype": torch.float64}, "takes torch.float16 or torch.bfloat16"),
        (FA3_FWD, {"dtype": torch.float16}, "fa3-fwd takes torch.bfloat16, the model is in torch.float16"),
        (FA2, {"head_dim": 264}, "head dims up to 256"),
        (FA3, {"head_dim": 100}, "multiples of 8, the model's is 100"),
        (FA2, {"sliding_window": 7}, "FlashAttention-2 cannot apply the model's sliding window of 7 tokens"),
        (FA3_FWD, {"sliding_window": 7}, "cannot apply"),
    ],
)
def test_unsupported_specs_are_named(package, change, reason):
    flavour = Flavour(package, fake_package(package).flash_attn_with_kvcache, n_processor=132)
    spec = AttentionSpec(8, 2, 128, None, torch.bfloat16)
    assert flavour.unsupported(spec) is None
    assert reason in flavour.unsupported(replace(spec, **change))


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a device of some compute capability with some of the packages."""

    def pretend(capability, *packages):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for package in PACKAGES:
            # None in sys.modules is what importing an absent module looks like, wherever the tests run.
            monkeypatch.setitem(sys.modules, package.module, fake_package(package) if package in packages else None)

    return pretend


@pytest.mark.parametrize(
    "capability,installed,wanted",
    [
        ((9, 0), (FA3, FA3_FWD, FA2), FA3),
        ((9, 0), (FA3_FWD, FA2), FA3_FWD),
        ((9, 0), (FA2,), FA2),
        ((8, 0), (FA3, FA3_FWD, FA2), FA2),
        ((10, 0), (FA3, FA3_FWD, FA2), FA2),
    ],
)
def test_the_best_package_for_the_device_is_taken(machine, capability, installed, wanted):
    machine(capability, *installed)
    flavour, why = find_flavour("cuda")
    assert flavour.package is wanted and flavour.n_processor == 132
    assert flavour.kernel is sys.modules[wanted.module].flash_attn_with_kvcache
    assert wanted.title in why and wanted.module in why


@pytest.mark.parametrize("capability,installed", [((9, 0), ()), ((8, 6), (FA3, FA3_FWD))])
def test_a_missing_package_is_named(machine, capability, installed):
    machine(capability, *installed)
    flavour, why = find_flavour("cuda")
    assert flavour is None
    assert why.startswith("no flash package could be imported: ") and "FlashAttention-2 (flash_attn): " in why
    assert ("fa3-fwd (fa3_fwd_interface): " in why) == (capability[0] == 9)


def test_a_package_that_does_not_load_is_passed_over(machine, monkeypatch):
    """One built for another CUDA, and one too old to have the function."""
    machine((9, 0), FA2)
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_with_kvcache")
    flavour, why = find_flavour("cuda")
    assert flavour is None and "has no attribute 'flash_attn_with_kvcache'" in why


@pytest.mark.parametrize("device,reason", [("cpu", "a CUDA device, not cpu"), ("cuda", "this device has 7.5")])
def test_devices_without_flash_are_named(machine, device, reason):
    machine((7, 5), FA2)
    flavour, why = find_flavour(device)
    assert flavour is None and reason in why
