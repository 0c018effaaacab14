"""Symmetric memory is used only where it sums right on every rank.

No GPU is needed: the group is a single gloo rank, and PyTorch's symmetric memory is a stand-in.
"""

import pytest
import torch
import torch.distributed as dist

from engine.parallel import all_reduce
from engine.parallel.all_reduce import (
    ONE_SHOT_BYTES,
    WORKSPACE_BYTES,
    AllReduce,
    SymmetricAllReduce,
    with_symmetric_memory,
)
from tests.support.parallel_cases import STEPS, FakeSymmetricMemory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def symmetric(group, fake: FakeSymmetricMemory) -> AllReduce:
    return with_symmetric_memory(group, CPU, ops=fake, memory=fake)


WAYS = [(1024, "one-shot"), (ONE_SHOT_BYTES, "one-shot"), (2 * ONE_SHOT_BYTES, "two-shot")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n_bytes,way", [*WAYS, (1032, None), (2 * WORKSPACE_BYTES, None)])
def test_the_size_of_a_tensor_decides_how_it_is_summed(group, n_bytes, way, dtype):
    """Unaligned or too large tensors, and other dtypes, use the process group; no result lies in the workspace."""
    fake = FakeSymmetricMemory()
    reduce = symmetric(group, fake)
    assert isinstance(reduce, SymmetricAllReduce)
    fake.calls.clear()
    x = torch.randn(2, n_bytes // dtype.itemsize // 2).to(dtype)
    first = reduce(x.clone())
    assert fake.calls == ([way] if way and dtype != torch.float64 else [])
    reduce(torch.zeros_like(x))
    torch.testing.assert_close(first, x, rtol=0, atol=0)


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("wrong", [*({"fails": step} for step in STEPS), {"error": 1.0}])
def test_what_fails_or_sums_wrong_is_not_used(group, wrong, n_ranks, monkeypatch):
    """No power of two divides by the alignment of three ranks' parts."""
    monkeypatch.setattr(all_reduce, "ALIGNMENT_BYTES", all_reduce.ALIGNMENT_BYTES * n_ranks)
    assert symmetric(group, FakeSymmetricMemory(**wrong)).name == "gloo"
