"""What the CPU kernel chooses and copies, and where it does not run. test_kernel_check.py is of its attention."""

from __future__ import annotations

import pytest
import torch

from kv_cache import FullKVCache
from kv_cache.refreshed import SelectionOps
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache
from models import ModelConfig
from models.attention import AttentionSpec, TorchAttention, cpp_backend, select_backend
from models.attention.cpp_backend import ENTRIES, CppAttention
from models.attention.selection import CppSelectionOps
from models.kernels.build import load_library
from tests.support.machine import needs_cpp_compiler

pytestmark = needs_cpp_compiler
SPEC = AttentionSpec(6, 2, 64, None, torch.float32)


@pytest.fixture(scope="module")
def backend() -> CppAttention:
    return CppAttention()


@pytest.mark.parametrize("source", ENTRIES)
@pytest.mark.parametrize("target", ENTRIES)
def test_copies_chosen_entries_as_the_reference_does(backend, source, target):
    """Rows are named, some are refilled, and choices overlap with those before."""
    config = ModelConfig(8, 3, 64, 2, 2, 24, 8, 99)
    full, ops = FullKVCache(config, 4, 50, dtype=source), CppSelectionOps(backend)
    ours, expected = (VerifyTopK(30, 9, n_sink=1).new_cache(config, 4, 0, "cpu", target) for _ in range(2))
    full.entries.copy_(torch.randint(-90, 90, full.entries.shape) / (1 if full.scales is not None else 7))
    if full.scales is not None:
        full.scales.uniform_()
    rows = torch.tensor([3, 0, 1])

    def entries_of(cache: VerifyTopKCache) -> torch.Tensor:
        """Sums over each entry's numbers, keys and values together, in ascending order."""
        values = cache.entries.float() * (1 if cache.scales is None else cache.scales[..., None])
        return (values[:, 0] + 3 * values[:, 1]).sum(dim=-1).sort(dim=-1).values

    for is_new in ([True, False, True], [True, True, False], [True, True, True]):
        chosen = torch.stack([torch.stack([torch.randperm(48)[:21] for _ in range(2)]) for _ in range(3)])
        for cache, copy in ((expected, SelectionOps().copy_chosen), (ours, ops.copy_chosen)):
            copy(cache.view(rows), 2, full.view(rows, 48), 0, chosen.clone(), torch.tensor(is_new))
        assert torch.equal(entries_of(ours), entries_of(expected)) and entries_of(ours)[2].any()
    ours.reset_row(0)
    ours.entries[:, :, 0] = 0
    ops.copy_chosen(ours.view(rows), 2, full.view(rows, 48), 0, chosen.clone(), torch.tensor([True] * 3))
    assert torch.equal(entries_of(ours), entries_of(expected)), "a row that is filled anew has lost its entries"


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
