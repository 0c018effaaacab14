"""The CPU kernel against the reference; a row's bits do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch

from kv_cache import FullKVCache
from kv_cache.entries import KV
from kv_cache.refreshed import SelectionOps
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache
from models import ModelConfig
from models.attention import AttentionSpec, TorchAttention, cpp_backend, select_backend
from models.attention.cpp_backend import ENTRIES, PART, CppAttention
from models.attention.selection import CppSelectionOps
from models.kernels import build as cpp_build
from tests.support.attention_cases import Case, FakeSlots, make_case, packed_case

SPEC = AttentionSpec(6, 2, 64, None, torch.float32)


@pytest.fixture(scope="module")
def backend() -> CppAttention:
    try:
        return CppAttention()
    except cpp_build.BuildError as error:
        if "wrong results" in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("n_token", [1, 2, 5, 70])
@pytest.mark.parametrize("group,head_dim", [(1, 64), (3, 64), (4, 128), (7, 64)])
@pytest.mark.parametrize("ring,sliding_window", [(False, None), (True, None), (False, 37)])
def test_equals_the_reference(backend, n_token, group, head_dim, ring, sliding_window):
    settings = {"group": group, "head_dim": head_dim, "ring": ring, "sliding_window": sliding_window}
    case = make_case([1, 17, 64, 128, 200], n_token, capacity=203, **settings)
    torch.testing.assert_close(case.run(backend).double(), case.reference(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_of_every_storage(backend, storage, dtype):
    """Rows have several parts; over int8 entries the kernel rounds queries to 15 bits."""
    case = make_case([2 * PART + 9, 5, PART], 4, storage=storage, dtype=dtype, capacity=2 * PART + 70)
    of_float32 = 2e-4 if storage == torch.int8 else 5e-6
    tolerance = of_float32 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.run(backend).double(), case.reference(), rtol=0, atol=tolerance)
    assert torch.equal(case.among_other_rows().run(backend), case.run(backend))


@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_block_the_batch_or_the_capacity(backend, storage, dtype):
    case = make_case([PART + 130, 40, 700], 4, storage=storage, dtype=dtype, capacity=PART + 400)
    whole = case.run(backend)

    def part(rows: slice, tokens: slice, extent: int) -> torch.Tensor:
        kv = KV(*(None if x is None else x[rows, :extent] for x in case.kv[:4]))
        slots = FakeSlots(case.slots.positions[rows, :extent], in_order=True)
        return Case(case.spec, case.q[rows, tokens], kv, case.queries[rows, tokens], slots).run(backend)

    for row in range(3):
        for token in range(4):
            extent = int(case.queries[row, token]) + 1
            alone = part(slice(row, row + 1), slice(token, token + 1), extent)
            assert torch.equal(alone[0, 0], whole[row, token])


@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("group,head_dim", [(1, 64), (3, 64), (4, 128)])
def test_notes_the_shares_of_each_token(backend, storage, group, head_dim):
    """Rows of less than a tile and of several parts; rows among others, and a sliding window."""
    settings = {"storage": storage, "group": group, "head_dim": head_dim}
    case = make_case([4, 40, PART + 203, 77], 4, capacity=PART + 203, **settings)
    tolerance = 1e-3 if storage == torch.int8 else 1e-5  # the kernel rounds queries to 15 bits
    for each in (case, case.among_other_rows()):
        each.assert_notes(backend, tolerance)
    make_case([4, 40, 203, 77], 4, capacity=203, sliding_window=37, **settings).assert_notes(backend, tolerance)


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
    for head_dim, dtype, said in ((80, torch.float32, "head_dim 80"), (64, torch.float64, "float64")):
        chosen, why = select_backend("auto", "cpu", AttentionSpec(6, 2, head_dim, None, dtype))
        assert isinstance(chosen, TorchAttention) and said in why


def test_a_machine_without_a_compiler_uses_torch(request, monkeypatch, tmp_path):
    """The reason is given, and asking for the kernel by name is an error."""
    cpp_backend.load_kernel.cache_clear()
    request.addfinalizer(cpp_backend.load_kernel.cache_clear)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    chosen, why = select_backend("auto", "cpu", SPEC)
    assert isinstance(chosen, TorchAttention) and "/nowhere/g++" in why
    with pytest.raises(Exception, match="--attention"):
        select_backend("cpp", "cpu", SPEC)


@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("head_dim,group", [(64, 16), (64, 48), (128, 32)])
def test_reads_4_bits_without_unpacking(backend, monkeypatch, storage, head_dim, group):
    for n_token, sliding_window in ((1, None), (5, None), (5, 100)):
        sizes = n_token, head_dim, group
        case = packed_case(*sizes, storage=storage, sliding_window=sliding_window, capacity=PART + 300)
        expected = case.reference()
        assert not backend.dequantizes(n_token, group)
        with monkeypatch.context() as patch:
            patch.setattr(KV, "unpacked", lambda *_: pytest.fail("entries are unpacked"))
            found = case.run(backend)
        tolerance = 2e-4 if storage == torch.int8 else 5e-6
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
