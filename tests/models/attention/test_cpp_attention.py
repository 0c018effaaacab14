"""What the CPU kernel chooses and copies, and where it does not run. test_kernel_check.py is of its attention."""

from __future__ import annotations

import pytest
import torch

from kv_cache.refreshed import SelectionOps
from models.attention import AttentionSpec, TorchAttention, cpp_backend, select_backend
from models.attention.cpp_backend import ENTRIES, CppAttention
from models.attention.selection import CppSelectionOps
from models.kernels.build import load_library
from tests.support.attention_cases import check_choices
from tests.support.machine import needs_cpp_compiler

pytestmark = needs_cpp_compiler
SPEC = AttentionSpec(6, 2, 64, None, torch.float32)


@pytest.fixture(scope="module")
def backend() -> CppAttention:
    return CppAttention()


@pytest.mark.parametrize("source", ENTRIES)
@pytest.mark.parametrize("target", ENTRIES)
def test_chooses_and_copies_entries_as_the_reference_does(backend, source, target):
    keeps = source == target or (source, target) == (torch.float32, torch.bfloat16)  # others go to the reference
    check_choices(CppSelectionOps(backend), source, target, keeps)


@pytest.mark.parametrize("chunk,n_first", [(4, 0), (4, 8), (1, 3), (7, 7)])
def test_chooses_the_chunks_that_the_reference_does(backend, chunk, n_first):
    """A text may end inside a chunk that is among the best, or be too short for a choice."""
    share, ops = torch.rand(5, 3, 640).pow(9)[..., :600], CppSelectionOps(backend)
    ends = torch.tensor([600 * chunk, 333 * chunk + chunk // 2, 67 * chunk + 1, 5 * chunk, -3])
    share[0], share[1, :, 333] = share[0].mul(8).round(), 2.0
    found, wanted = (how.best_chunks(share, chunk, ends, n_first, 66 * chunk - 1) for how in (ops, SelectionOps()))
    assert torch.equal(found[:3].sort(dim=-1).values, wanted[:3].sort(dim=-1).values)
    assert (found[0].sort(dim=-1).values[:, :n_first] == torch.arange(n_first)).all()
    assert {*found[3].flatten().tolist()} <= {*range(5 * chunk)} and not found[4].any()


def test_a_model_that_the_kernel_does_not_take_runs_on_torch(backend):
    for head_dim, dtype, said in ((72, torch.float32, "head_dim 72"), (64, torch.float64, "float64")):
        chosen, why = select_backend("auto", "cpu", AttentionSpec(6, 2, head_dim, None, dtype))
        assert isinstance(chosen, TorchAttention) and said in why


def test_a_machine_without_a_compiler_uses_torch(monkeypatch, tmp_path):
    """The reason is given, and naming the kernel is an error."""
    monkeypatch.setattr(cpp_backend, "load_library", load_library.__wrapped__)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    chosen, why = select_backend("auto", "cpu", SPEC)
    assert isinstance(chosen, TorchAttention) and "/nowhere/g++" in why
    with pytest.raises(Exception, match="--attention"):
        select_backend("cpp", "cpu", SPEC)
