"""The flash backend over stand-ins for its three packages, against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import attention_cases
import pytest
import torch
from fake_flash_attn import fake_package
from no_host_reads import NoHostReads
from tiny import full_cache, random_prompts, tiny_model

from engine import ModelRunner, SelfSpeculation, generate
from kv_cache import StreamingKVCache
from models.attention.base import MAX_BLOCK
from models.attention.flash_backend import FA2, FA3, FA3_FWD, FlashAttention, Flavour
from models.attention.torch_backend import TorchAttention

PACKAGES = {"fa3": FA3, "fa3_fwd": FA3_FWD, "fa2": FA2}
CAPACITY, HEAD_DIM = 40, 16
with_each_package = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def make_case(n_token, group, starts=(0, 9, 17, 1), block_ends_view=False, **settings):
    """Ragged rows over a head-major cache whose invisible slots hold leftovers."""
    settings = {"capacity": CAPACITY, "head_dim": HEAD_DIM} | settings
    case = attention_cases.make_case([start + n_token for start in starts], n_token, group=group, **settings)
    return replace(case, slots=replace(case.slots, block_ends_view=block_ends_view))


def make_backend(package, dtypes=(torch.float32,), n_processor=132):
    """The backend over a stand-in that takes `dtypes`, its fallback, and the stand-in's calls."""
    package = package._replace(dtypes=dtypes)
    module, fallback = fake_package(package), Mock(wraps=TorchAttention())
    backend = FlashAttention(Flavour(package, module.flash_attn_with_kvcache, n_processor), fallback)
    return backend, fallback, module.calls


def assert_equals_reference(case, out):
    torch.testing.assert_close(out, case.run(TorchAttention()), rtol=1e-5, atol=2e-6)


def assert_runs_on_flash(case, package):
    backend, fallback, calls = make_backend(package)
    with NoHostReads():
        out = case.run(backend)
    assert_equals_reference(case, out)
    assert torch.equal(case.among_other_rows().run(backend), case.run(backend))
    if case.q.shape[1] <= MAX_BLOCK:
        case.among_other_rows().assert_notes(backend)
    assert len(calls) == 3 + 2 * (case.q.shape[1] <= MAX_BLOCK) and fallback.method_calls == []


@with_each_package
@pytest.mark.parametrize("n_token", [1, 2, 4, 8, MAX_BLOCK])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_equals_the_reference_on_ragged_rows(package, n_token, group):
    if package is FA2 and group > 1 < n_token:
        return
    for window in (None, 1, 3, 12, 100) if package is FA3 else (None,):
        assert_runs_on_flash(make_case(n_token, group, sliding_window=window), package)


@with_each_package
def test_a_chunk_that_ends_its_view_runs_on_flash(package):
    assert_runs_on_flash(make_case(24, 3, starts=(CAPACITY - 24,) * 2, block_ends_view=True), package)


@with_each_package
@pytest.mark.parametrize("n_token", [2, MAX_BLOCK])
def test_an_idle_row_is_finite_and_leaves_the_others_alone(package, n_token):
    """A row that was never admitted has all its queries at position 0, here over a view of T slots."""
    case = make_case(n_token, 3, starts=(0, 0, 0), capacity=n_token)
    case.queries[1] = 0
    backend, _, _ = make_backend(package)
    out, wanted = case.run(backend), case.run(TorchAttention())
    assert out.isfinite().all()
    torch.testing.assert_close(out[[0, 2]], wanted[[0, 2]], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out[1, -1], wanted[1, -1], rtol=1e-5, atol=2e-6)


@with_each_package
@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 0]])
def test_tokens_in_4_bits_go_to_the_fallback(package, rows):
    """The kernels would see what is beside them alone. Rows are those of a view by name."""
    case = attention_cases.packed_case(1, HEAD_DIM, 4, which=rows)
    backend, _, calls = make_backend(package)
    torch.testing.assert_close(case.run(backend).double(), case.reference(), rtol=1e-5, atol=2e-6)
    assert not calls


@with_each_package
@pytest.mark.parametrize("slots", [2, 5])
def test_speculative_decoding_over_flash_gives_the_tokens_of_torch(package, slots):
    """Ragged prompts, idle rows, prefill in chunks, and drafts over a ring, which is the fallback's."""
    model, prompts = tiny_model(dtype=torch.float32), random_prompts([5, 17, 1])
    wanted = generate(ModelRunner(model, full_cache(model, slots)), prompts, max_new_tokens=10).tokens
    model.backend, fallback, calls = make_backend(package)
    runner = ModelRunner(model, full_cache(model, slots), prefill_chunk=4)
    draft_cache = StreamingKVCache(model.config, slots, 8, 1, dtype=torch.float32)
    out = generate(runner, prompts, max_new_tokens=10, drafter=SelfSpeculation(runner, draft_cache, gamma=3))
    assert out.tokens == wanted
    assert calls and fallback.attend.called


ANY = tuple(PACKAGES.values())
FALLBACKS = {
    "ring": (ANY, make_case(4, 3, ring=True)),
    "ring of one token": (ANY, make_case(1, 3, ring=True)),
    "int8": (ANY, make_case(4, 3, storage=torch.int8)),
    "int8 of one token": (ANY, make_case(1, 3, storage=torch.int8)),
    "ragged chunk": (ANY, make_case(MAX_BLOCK + 1, 3)),
    "head_dim": (ANY, make_case(4, 3, head_dim=12)),
    "dtype": (ANY, make_case(4, 3, dtype=torch.float64)),
    "group": ((FA2,), make_case(4, 3)),
    "window": ((FA2, FA3_FWD), make_case(4, 3, sliding_window=5)),
    "window of one token": ((FA2, FA3_FWD), make_case(1, 3, sliding_window=5)),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_flash_cannot_express_goes_to_the_fallback(reason):
    packages, case = FALLBACKS[reason]
    for package in packages:
        backend, fallback, calls = make_backend(package)
        prepared = backend.prepare(case.spec, case.queries, case.slots)
        for _ in range(2):
            assert_equals_reference(case, backend.attend(case.q, case.kv, prepared))
        assert (fallback.prepare.call_count, fallback.attend.call_count) == (1, 2) and not calls
