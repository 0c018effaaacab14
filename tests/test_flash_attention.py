"""The flash backend over stand-ins for its three packages, against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import attention_cases
import pytest
import torch
from fake_flash_attn import fake_package
from no_host_reads import NoHostReads

from models.attention.base import MAX_BLOCK
from models.attention.flash_backend import FA2, FA3, FA3_FWD, FlashAttention, Flavour
from models.attention.torch_backend import TorchAttention

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
    return FlashAttention(Flavour(package, module.flash_attn_with_kvcache, 132), fallback), fallback, module


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


@with_each_package
def test_an_idle_row_is_finite_and_leaves_the_others_alone(package):
    """A row that was never admitted has all its queries at position 0."""
    case = make_case(2, 3, starts=(0, 0, 0), capacity=2)
    case.queries[1] = 0
    out, wanted = case.run(make_backend(package)[0]), case.run(TorchAttention())
    assert out.isfinite().all()
    torch.testing.assert_close(out[[0, 2]], wanted[[0, 2]], rtol=1e-5, atol=2e-6)


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
