"""The flash backend over stand-ins for its three packages, and the backend that each machine gets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, PropertyMock

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from models.attention import AttentionSpec, select_backend
from models.attention.base import MAX_BLOCK
from models.attention.flash_backend import FA2, FA3, FA3_FWD, FlashAttention, Package
from models.attention.torch_backend import TorchAttention
from tests.support import attention_cases
from tests.support.recorded_graph import NoHostReads


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool, window: tuple[int, int]) -> Tensor:
    """Return the output `[B, T, H, D]`; 0 for queries that see nothing."""
    n_row, n_slot = q.shape[1], k.shape[1]
    if lengths is None:
        lengths = torch.full(q.shape[:1], n_slot)
    slot, length = torch.arange(n_slot), lengths.long()[:, None, None]
    # Aligned to the bottom right: the last query is that of the last key.
    at = torch.arange(n_row)[:, None] + length - n_row
    left, right = window if not causal else (window[0], 0)
    visible = (slot < length) & ((slot >= at - left) | (left < 0)) & ((slot <= at + right) | (right < 0))
    return attention_cases.masked_attention(q.double(), k.double(), v.double(), visible).to(q.dtype)


def fake_package(package: Package) -> ModuleType:
    """Return a module with the package's kernel, whose `calls` counts its calls."""
    module, is_fa2 = ModuleType(package.module), package.module == FA2.module

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens=None, cache_batch_idx=None, causal=False, window_size=(-1, -1), **more
    ):
        assert more.keys() <= ({"num_splits"} if is_fa2 else {"num_splits", "pack_gqa"}), more
        assert q.dtype in package.dtypes and k_cache.dtype == v_cache.dtype == q.dtype
        assert q.shape[3] % 8 == 0 and all(x.stride(-1) == 1 for x in (q, k_cache, v_cache))
        for index in (cache_seqlens, cache_batch_idx):
            assert index is None or index.dtype == torch.int32
        assert package.has_windows or not 0 <= window_size[0] < k_cache.shape[1] - 1, "no windows in this build"
        if cache_batch_idx is not None:
            k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        module.calls += 1
        return attention(q, k_cache, v_cache, cache_seqlens, causal, window_size)

    module.calls = 0
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


CAPACITY, HEAD_DIM = 40, 16
PACKAGES = (FA3, FA3_FWD, FA2)
with_each_package = pytest.mark.parametrize("package", PACKAGES, ids=("fa3", "fa3_fwd", "fa2"))


def make_case(n_token, group, starts=(0, 9, 17, 1), block_ends_view=False, **settings):
    """Ragged rows over a head-major cache whose invisible slots hold leftovers."""
    settings = {"capacity": CAPACITY, "head_dim": HEAD_DIM} | settings
    case = attention_cases.make_case([start + n_token for start in starts], n_token, group=group, **settings)
    return replace(case, slots=replace(case.slots, block_ends_view=block_ends_view))


def make_backend(package):
    """Return the backend over a stand-in that takes float32, its fallback, and the stand-in."""
    package = package._replace(dtypes=(torch.float32,))
    module, fallback = fake_package(package), Mock(wraps=TorchAttention())
    return FlashAttention(package, module.flash_attn_with_kvcache, 132, fallback), fallback, module


def assert_runs_on_flash(case, package):
    backend, fallback, module = make_backend(package)
    with NoHostReads():
        out = case.run(backend)
    torch.testing.assert_close(out, case.run(TorchAttention()), rtol=1e-5, atol=2e-6)
    assert torch.equal(case.among_other_rows().run(backend), out)
    if case.q.shape[1] <= MAX_BLOCK:
        case.among_other_rows().assert_notes(backend)
    assert module.calls >= 2 and fallback.method_calls == []


@with_each_package
@pytest.mark.parametrize("n_token,group", [(1, 1), (1, 3), (4, 1), (4, 3), (MAX_BLOCK, 4)])
def test_equals_the_reference_on_ragged_rows(package, n_token, group):
    if package is FA2 and group > 1 < n_token:
        return
    for window in (None, 1, 12, 100) if package is FA3 else (None,):
        assert_runs_on_flash(make_case(n_token, group, sliding_window=window), package)


@with_each_package
def test_a_chunk_that_ends_its_view_runs_on_flash(package):
    assert_runs_on_flash(make_case(24, 3, starts=(CAPACITY - 24,) * 2, block_ends_view=True), package)


FALLBACKS = {
    "ring": (PACKAGES, make_case(4, 3, ring=True)),
    "int8": (PACKAGES, make_case(4, 3, storage=torch.int8)),
    "4 bits": (PACKAGES, attention_cases.packed_case(1, HEAD_DIM, 4)),
    "ragged chunk": (PACKAGES, make_case(MAX_BLOCK + 1, 3)),
    "head_dim": (PACKAGES, make_case(4, 3, head_dim=12)),
    "dtype": (PACKAGES, make_case(4, 3, dtype=torch.float64)),
    "group": ((FA2,), make_case(4, 3)),
    "window": ((FA2, FA3_FWD), make_case(4, 3, sliding_window=5)),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_cases_that_flash_cannot_express_go_to_the_fallback(reason):
    packages, case = FALLBACKS[reason]
    for package in packages:
        backend, _, module = make_backend(package)
        torch.testing.assert_close(case.run(backend).double(), case.reference(), rtol=1e-5, atol=1e-5)
        assert module.calls == 0


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
        monkeypatch.setattr("models.attention.select.refusal", refused.get)
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


# The flag, the device, fields of the model and of the machine, and what is taken with which reason; None: a refusal.
CHOICES = [
    ("auto", "cuda", {}, {}, "triton", "Triton"),
    ("triton", "cuda", {"head_dim": 80}, {}, "torch", "head_dim"),
    ("auto", "cuda", {}, WITHOUT_TRITON, "torch", "triton"),
    ("auto", "cuda", {}, NO_COMPILER, "torch", "gcc"),
    ("auto", "cuda", {}, {"refused": {"triton": "wrong results"}}, "torch", "wrong results"),
    ("flash", "cuda", {}, {"packages": PACKAGES, "refused": {"flash": "it crashes"}}, "triton", "it crashes"),
    ("flash", "cuda", {}, {"packages": PACKAGES}, "flash", FA3.title),
    ("flash", "cuda", {}, {"packages": (FA2,)}, "flash", FA2.title),
    ("flash", "cuda", {}, {"capability": (8, 0), "packages": PACKAGES}, "flash", FA2.title),
    ("flash", "cuda", {"dtype": torch.float32}, {"packages": (FA3,)}, "torch", "float32"),
    ("flash", "cuda", {"sliding_window": 7}, {"packages": (FA2,)}, "triton", "sliding window"),
    ("triton", "cuda", {}, WITHOUT_TRITON, None, "--attention"),
    ("triton", "cpu", {}, {}, None, "--attention"),
    ("cpp", "cuda", {}, {}, None, "--attention"),
    ("flash", "cpu", {}, {"packages": PACKAGES}, None, "--attention"),
    ("flash", "cuda", {}, {"capability": (7, 5), "packages": PACKAGES}, None, "--attention"),
    ("xformers", "cpu", {}, {}, None, "--attention"),
]


@pytest.mark.parametrize("name,device,model,on,chosen,reason", CHOICES)
def test_the_best_backend_is_taken_with_a_reason(machine, name, device, model, on, chosen, reason):
    machine(**on)
    if chosen is None:
        with pytest.raises(ConfigError, match=reason):
            select_backend(name, device, SPEC)
    else:
        backend, why = select_backend(name, device, replace(SPEC, **model))
        assert backend.name == chosen and "\n" not in why and reason in why
