"""The sum over ranks, by the process group or through PyTorch's symmetric memory where that works."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A whole decoding block of a large model fits; longer ones (prefill chunks) go through the process group.
WORKSPACE_BYTES = 8 << 20
# Below this one kernel reads all peers' data; above it, each rank sums its part and shares it.
ONE_SHOT_BYTES = 256 << 10
ALIGNMENT_BYTES = 16  # of each rank's part


class AllReduce:
    """Sums by NCCL or gloo, whichever the group has; without a group it sums nothing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.name = "none" if group is None else dist.get_backend(group).rpartition(":")[2]

    def __call__(self, x: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x


class SymmetricAllReduce(AllReduce):
    """One-shot and two-shot all-reduce over memory that GPUs of one machine map from each other.

    ops: `torch.ops.symm_mem`. workspace: symmetric memory that the group's ranks join.
    """

    def __init__(self, group: dist.ProcessGroup, workspace: Tensor, ops: Any) -> None:
        super().__init__(group)
        self.name = "symmetric memory"
        self.workspace, self._ops, self._group_name = workspace, ops, group.group_name
        self._aligned_to = ALIGNMENT_BYTES * group.size()

    def __call__(self, x: Tensor) -> Tensor:
        n_bytes = x.numel() * x.element_size()
        fits = n_bytes <= WORKSPACE_BYTES and n_bytes % self._aligned_to == 0
        if not fits or x.dtype not in (torch.bfloat16, torch.float32):
            return super().__call__(x)
        shared = self.workspace[:n_bytes].view(x.dtype)
        shared.copy_(x.reshape(-1))
        if n_bytes <= ONE_SHOT_BYTES:
            return self._ops.one_shot_all_reduce(shared, "sum", self._group_name).view(x.shape)
        # In place: the result leaves the workspace before the next call writes to it.
        return self._ops.two_shot_all_reduce_(shared, "sum", self._group_name).clone().view(x.shape)

    def sums_right(self, n_bytes: int) -> bool:
        """Compare a sum of at most `n_bytes` with the group's. Every rank has to call this."""
        n_bytes -= n_bytes % self._aligned_to  # else the group sums, and 3 ranks would test nothing
        # Whole numbers that differ by rank and index, small enough for the sum to be exact.
        values = (torch.arange(n_bytes // 4, device=self.workspace.device) % 1000 + dist.get_rank(self._group)).float()
        expected = super().__call__(values.clone())  # first, since the other sum may raise on some ranks only
        return torch.equal(self(values), expected)


def choose_all_reduce(group: dist.ProcessGroup | None, device: torch.device) -> AllReduce:
    """Choose symmetric memory for GPUs of one machine if it gives right sums on all of them, else the group."""
    is_allowed = os.environ.get("ENABLE_INTRA_NODE_COMM", "1") != "0"
    if group is None or device.type != "cuda" or not is_allowed:
        return AllReduce(group)
    # GROUP_RANK is the number of a rank's machine.
    machines: list[str | None] = [None] * group.size()
    dist.all_gather_object(machines, os.environ.get("GROUP_RANK"), group)
    return with_symmetric_memory(group, device) if len(set(machines)) == 1 else AllReduce(group)


def with_symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, ops: Any = None, memory: Any = None
) -> AllReduce:
    """Return symmetric memory if it works and sums right at both sizes on all ranks of `group`, else the group.

    Ranks agree after every step, so that none waits in a step that another could not take.
    """
    reduce: list[SymmetricAllReduce] = []

    def allocate() -> None:
        nonlocal memory, ops
        if memory is None:
            import torch.distributed._symmetric_memory as memory
        workspace = memory.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        reduce.append(SymmetricAllReduce(group, workspace, ops or torch.ops.symm_mem))

    steps = (
        allocate,
        lambda: memory.rendezvous(reduce[0].workspace, group.group_name),
        lambda: reduce[0].sums_right(ONE_SHOT_BYTES),
        lambda: reduce[0].sums_right(2 * ONE_SHOT_BYTES),
    )
    return reduce[0] if all(_succeeds(step, group, device) for step in steps) else AllReduce(group)


def _succeeds(step: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether, on every rank, a step neither raises nor returns False."""
    try:
        worked = step() is not False
    except Exception:  # an unsupported topology, driver or build: each says so in another way
        worked = False
    everywhere = torch.tensor([float(worked)], device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return bool(everywhere.item())
