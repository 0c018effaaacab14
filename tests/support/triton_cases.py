"""The Triton backend against the torch backend, in Triton's interpreter; run by test_triton_kernels.py.

It runs in a separate process: TRITON_INTERPRET has to be set before anything imports triton, and must not be set while
torch compiles.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.errors import OutOfResources

from common.launch import Multiprocessors, launch_on
from kv_cache import quantized, triton_choosing, triton_packing
from kv_cache.entries import KV
from kv_cache.triton_choosing import TritonSelectionOps
from models.attention import MAX_BLOCK, TorchAttention, triton_backend
from models.attention.triton_backend import TritonAttention, TritonPrepared, unsupported
from tests.support.attention_cases import Case, check_choices, make_case, packed_case, packed_in_turns

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
# Small enough for a few hundred slots to make several chunks; a multiple of every tile.
CHUNK = 64


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    large = Multiprocessors(n=1000)
    for name, value in (("multiprocessors", lambda _: large), ("MIN_CHUNK", CHUNK), ("SLOTS_PER_ROW", 0)):
        monkeypatch.setattr(triton_backend, name, value)


def check(case: Case) -> None:
    """Require that the Triton backend equals attention in float64 over the same entries."""
    backend = TritonAttention()
    prepared = backend.prepare(case.spec, case.queries, case.slots)
    assert isinstance(prepared, TritonPrepared)
    as_in_a_model = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    out = backend.attend(as_in_a_model, case.kv, prepared)
    assert out.is_contiguous() and out.dtype == case.spec.dtype
    mapped = case.among_other_rows()
    again = backend.attend(as_in_a_model, mapped.kv, backend.prepare(case.spec, case.queries, mapped.slots))
    assert torch.equal(again, out)
    tolerance = TOLERANCE[out.dtype]
    if case.slots.in_order:
        mapped.assert_notes(backend, tolerance, out)
    torch.testing.assert_close(out.double(), case.reference(), rtol=tolerance, atol=tolerance)


def after(lengths: list[int], n_token: int, capacity: int, n_kv_head: int = 1, **settings) -> Case:
    """Return rows whose blocks follow `lengths` tokens."""
    return make_case([n + n_token for n in lengths], n_token, capacity=capacity, n_kv_head=n_kv_head, **settings)


@pytest.mark.parametrize(
    "lengths,n_token,capacity,settings",
    [
        # A row has only its queries, another ends at a chunk's border, the last at the last slot.
        ([0, CHUNK - 1, 149], 1, 150, {"group": 8, "head_dim": 128}),
        ([0, CHUNK - 5, 75], 5, 80, {"group": 3}),
        ([0, 65], 5, 75, {"group": 4, "dtype": torch.float16}),
        ([0, 65], 2, 75, {"group": 4, "dtype": torch.float16, "storage": torch.int8, "n_kv_head": 2}),
        ([0, 65], 1, 75, {"group": 4, "storage": torch.float8_e4m3fn, "ring": True}),
        ([1, 40, 400], 16, 33, {"group": 8, "ring": True}),
        ([1, 40, 400], 1, 150, {"group": 1, "ring": True}),
        ([0, 70, 75], 5, 80, {"group": 2, "sliding_window": 1}),
        ([0, 70, 130], 5, 140, {"group": 2, "sliding_window": 100, "ring": True}),
    ],
)
def test_attention_is_that_of_the_reference(lengths, n_token, capacity, settings):
    """Ragged rows, in order or in rings with holes."""
    check(after(lengths, n_token, capacity, **settings))


@pytest.mark.parametrize("in_order", [True, False])
def test_queries_that_do_not_follow_each_other(in_order):
    """An idle row repeats a position; nothing says that positions ascend."""
    case = after([0, 80, 60], 3, 90)
    queries = torch.tensor([[0, 0, 0], [82, 20, 81], [62, 62, 3]])
    check(replace(case, queries=queries, slots=replace(case.slots, in_order=in_order)))


@pytest.mark.parametrize(
    "n_token,sliding_window,quant_group,storage,dtype",
    [
        (1, 60, 7, torch.float32, torch.float32),
        (7, None, 7, torch.float32, torch.float32),
        (MAX_BLOCK, None, 16, torch.int8, torch.float16),
    ],
)
def test_tokens_in_4_bits_beside_recent_ones(monkeypatch, n_token, sliding_window, quant_group, storage, dtype):
    """4 bits are read without unpacking, in rows by name; the longest block takes two tiles of query rows."""
    kind = {"storage": storage, "dtype": dtype, "sliding_window": sliding_window, "capacity": 100}
    case = packed_case(n_token, 64, quant_group, **kind)
    expected = case.reference()
    monkeypatch.setattr(KV, "unpacked", lambda *_: pytest.fail("entries are unpacked"))
    torch.testing.assert_close(case.run(TritonAttention()).double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "n_token,head_dim,dtype", [(MAX_BLOCK + 1, 64, torch.float32), (2, 80, torch.float32), (2, 64, torch.float64)]
)
def test_cases_that_the_kernel_does_not_take_run_on_torch(n_token, head_dim, dtype):
    case = after([0, 40], n_token, 60, head_dim=head_dim, dtype=dtype)
    assert torch.equal(case.run(TritonAttention()), case.run(TorchAttention()))
    assert (unsupported(case.spec) is None) == (n_token > MAX_BLOCK)


def test_a_tile_that_does_not_fit_on_the_gpu_runs_on_torch(monkeypatch, capsys):
    def fail(*_):
        raise OutOfResources(2**17, 2**16, "shared memory")

    case = make_case([41, 7], 3, head_dim=64, dtype=torch.float32)
    exact = case.reference()
    monkeypatch.setattr(triton_backend, "launch_on", fail)
    torch.testing.assert_close(case.run(TritonAttention()).double(), exact, rtol=1e-5, atol=1e-5)
    assert "shared memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source,target,by_name,chunk",
    [
        (torch.int8, torch.int8, True, 8),
        (torch.float32, torch.float16, False, 5),
        (torch.int8, torch.float32, False, 8),  # which goes to the reference
    ],
)
def test_entries_are_chosen_as_the_reference_does_and_only_new_ones_copied(source, target, by_name, chunk, monkeypatch):
    monkeypatch.setattr("kv_cache.triton_choosing.TILE_CHUNKS", 16)
    keeps = (source, target) != (torch.int8, torch.float32)
    check_choices(TritonSelectionOps(), source, target, keeps, chunk, by_name)


@pytest.mark.parametrize("stored,group,head_dim", [(torch.int8, 7, 64), (torch.float32, 16, 128)])
def test_groups_are_packed_into_4_bits_as_the_reference_does(stored, group, head_dim, monkeypatch):
    n_launch = Mock(side_effect=launch_on)
    monkeypatch.setattr("kv_cache.quantized.launch_on", n_launch)
    found = [packed_in_turns(stored, group, head_dim, kernel) for kernel in (None, triton_packing)]
    assert all(map(torch.equal, *found)) and found[0][3].any()
    assert n_launch.call_count > 2 * 7


def test_kernels_that_choose_or_pack_otherwise_are_not_used(monkeypatch, capsys):
    """Kernels are compared on the device where they first run."""
    cpu, planned, plan = torch.device("cpu"), triton_packing.plan_packing, triton_choosing.plan_choice
    assert triton_choosing.difference(cpu, torch.float32, 64) is None
    monkeypatch.setattr(triton_packing, "plan_packing", lambda entries, *given: planned(entries.flip(0), *given))
    assert "False" in str(quantized.difference(triton_packing, cpu, torch.float32, 64, 16))
    monkeypatch.setattr(triton_choosing, "plan_choice", lambda *given: plan(*given[:-1], given[-1] - 9))
    triton_choosing.is_right.cache_clear()
    assert not triton_choosing.is_right(cpu, torch.float32, 64) and capsys.readouterr().err
    triton_choosing.is_right.cache_clear()
