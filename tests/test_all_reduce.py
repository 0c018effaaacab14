"""Which all-reduce is chosen, and that symmetric memory is used only where it sums right on every rank.

No GPU is needed: one gloo rank stands for the group, and a fake for PyTorch's symmetric memory.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine.all_reduce import (
    ONE_SHOT_BYTES,
    WORKSPACE_BYTES,
    ProcessGroupAllReduce,
    SymmetricAllReduce,
    Whole,
    choose_all_reduce,
    with_symmetric_memory,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class FakeSymmetricMemory:
    """The documented calls: a workspace that is joined under the group's name, and sums over that group.

    The sum over one rank is its own data; `error` is added to it.
    """

    def __init__(self, error: float = 0.0, raises: bool = False) -> None:
        self.error, self.raises = error, raises
        self.joined: list[tuple[torch.Tensor, str]] = []
        self.calls: list[str] = []

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.raises:
            raise RuntimeError("no multicast support")
        return torch.zeros(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group_name: str) -> None:
        self.joined.append((tensor, group_name))

    def one_shot_all_reduce(self, x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
        self._check("one-shot", x, op, group_name)
        return x + self.error

    def two_shot_all_reduce_(self, x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
        self._check("two-shot", x, op, group_name)
        return x.add_(self.error)

    def _check(self, name: str, x: torch.Tensor, op: str, group_name: str) -> None:
        (workspace, joined_under), *_ = self.joined
        assert (op, group_name) == ("sum", joined_under)
        assert x.untyped_storage().data_ptr() == workspace.untyped_storage().data_ptr(), "not in symmetric memory"
        self.calls.append(name)


def symmetric(group, fake: FakeSymmetricMemory):
    plain = ProcessGroupAllReduce(group)
    return with_symmetric_memory(group, CPU, plain, ops=fake, memory=fake), plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "n_bytes,way",
    [
        (1024, "one-shot"),
        (ONE_SHOT_BYTES, "one-shot"),
        (2 * ONE_SHOT_BYTES, "two-shot"),
        (1032, None),
        (2 * WORKSPACE_BYTES, None),
    ],
)
def test_size_decides_the_way(group, n_bytes, way, dtype):
    """Too large or unaligned tensors go through the process group; results never alias the workspace."""
    fake = FakeSymmetricMemory()
    reduce, _ = symmetric(group, fake)
    assert isinstance(reduce, SymmetricAllReduce)
    fake.calls.clear()
    x = torch.randn(2, n_bytes // dtype.itemsize // 2).to(dtype)
    first = reduce(x.clone())
    assert fake.calls == ([way] if way else [])
    reduce(torch.zeros_like(x))
    torch.testing.assert_close(first, x, rtol=0, atol=0)


def test_other_dtypes_go_through_the_process_group(group):
    fake = FakeSymmetricMemory()
    reduce, _ = symmetric(group, fake)
    fake.calls.clear()
    assert reduce(torch.ones(64, dtype=torch.float64)).sum() == 64
    assert fake.calls == []


@pytest.mark.parametrize("fake", [FakeSymmetricMemory(raises=True), FakeSymmetricMemory(error=1.0)])
def test_what_fails_or_sums_wrong_is_not_used(group, fake):
    reduce, plain = symmetric(group, fake)
    assert reduce is plain


def test_the_choice(group, monkeypatch):
    assert isinstance(choose_all_reduce(None, CPU), Whole)
    assert choose_all_reduce(group, CPU).name == "gloo"
    chosen = []
    monkeypatch.setattr("engine.all_reduce.with_symmetric_memory", lambda *arguments: chosen.append(1) or Whole())
    gpu = torch.device("cuda:0")
    for machine, wanted, tried in (("8", "1", True), ("8", "0", False), ("4", "1", False)):
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", machine)
        monkeypatch.setenv("ENABLE_INTRA_NODE_COMM", wanted)
        chosen.clear()
        choose_all_reduce(group, gpu)
        assert bool(chosen) == tried
