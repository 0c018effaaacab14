"""PyTorch's symmetric memory without a GPU: its documented calls, its sums made by the process group."""

import torch
import torch.distributed as dist

STEPS = ("empty", "rendezvous", "one-shot", "two-shot")


class FakeSymmetricMemory:
    """A workspace that is joined under the group's name, and sums over all ranks.

    `fails` is the step that raises; `error` is added to every sum.
    """

    def __init__(self, error: float = 0.0, fails: str = "") -> None:
        self.error, self.fails = error, fails
        self.joined: list[tuple[torch.Tensor, str]] = []
        self.calls: list[str] = []

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._call("empty")
        return torch.zeros(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group_name: str) -> None:
        self._call("rendezvous")
        self.joined.append((tensor, group_name))

    def one_shot_all_reduce(self, x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
        return self._sum("one-shot", x.clone(), x, op, group_name)

    def two_shot_all_reduce_(self, x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
        return self._sum("two-shot", x, x, op, group_name)

    def _sum(self, name: str, into: torch.Tensor, x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
        (workspace, joined_under), *_ = self.joined
        assert (op, group_name) == ("sum", joined_under)
        assert x.untyped_storage().data_ptr() == workspace.untyped_storage().data_ptr(), "not in symmetric memory"
        dist.all_reduce(into)
        self._call(name)
        return into.add_(self.error)

    def _call(self, step: str) -> None:
        self.calls.append(step)
        if step == self.fails:
            raise RuntimeError("no multicast support")
