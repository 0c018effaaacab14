"""The sum over ranks, by the process group or through PyTorch's symmetric memory where that works."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# A whole decoding block of a large model fits; longer ones (prefill chunks) go through the process group.
WORKSPACE_BYTES = 8 << 20
# Below this one kernel reads all peers' data; above it, each rank sums its part and shares it.
ONE_SHOT_BYTES = 256 << 10
ALIGNMENT_BYTES = 16


class AllReduce(Protocol):
    name: str

    def __call__(self, x: Tensor) -> Tensor: ...


class Whole:
    """A model that one rank holds: there is nothing to sum."""

    name = "none"

    def __call__(self, x: Tensor) -> Tensor:
        return x


class ProcessGroupAllReduce:
    """NCCL or gloo, whichever the group has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.name = str(dist.get_backend(group))

    def __call__(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x


class SymmetricAllReduce:
    """One-shot and two-shot all-reduce over memory that GPUs of one machine map from each other.

    `ops` and `memory` are `torch.ops.symm_mem` and `torch.distributed._symmetric_memory`.
    Errors: whatever those raise where the hardware or the build has no such thing.
    """

    name = "symmetric memory"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ops: Any, memory: Any) -> None:
        self._ops = ops
        self._group_name = group.group_name
        self._size = group.size()
        self._otherwise = ProcessGroupAllReduce(group)
        self._workspace = memory.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        memory.rendezvous(self._workspace, self._group_name)

    def __call__(self, x: Tensor) -> Tensor:
        n_bytes = x.numel() * x.element_size()
        fits = n_bytes <= WORKSPACE_BYTES and n_bytes % (ALIGNMENT_BYTES * self._size) == 0
        if not fits or x.dtype not in (torch.bfloat16, torch.float32):
            return self._otherwise(x)
        shared = self._workspace[:n_bytes].view(x.dtype)
        shared.copy_(x.reshape(-1))
        if n_bytes <= ONE_SHOT_BYTES:
            return self._ops.one_shot_all_reduce(shared, "sum", self._group_name).view(x.shape)
        # In place: the result leaves the workspace before the next call writes to it.
        return self._ops.two_shot_all_reduce_(shared, "sum", self._group_name).clone().view(x.shape)


def choose_all_reduce(group: dist.ProcessGroup | None, device: torch.device) -> AllReduce:
    """Symmetric memory for GPUs of one machine if it gives right sums on all of them, else the process group."""
    if group is None:
        return Whole()
    plain = ProcessGroupAllReduce(group)
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    wanted = os.environ.get("ENABLE_INTRA_NODE_COMM", "1") != "0"
    if device.type != "cuda" or not one_machine or not wanted:
        return plain
    return with_symmetric_memory(group, device, plain)


def with_symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, otherwise: AllReduce, ops: Any = None, memory: Any = None
) -> AllReduce:
    """Try symmetric memory at both sizes; the ranks of `group` agree on whether it is used."""
    works = torch.ones(1, device=device)
    symmetric: AllReduce | None = None
    try:
        if memory is None:
            import torch.distributed._symmetric_memory as memory
        symmetric = SymmetricAllReduce(group, device, ops or torch.ops.symm_mem, memory)
        for n_bytes in (ONE_SHOT_BYTES, 2 * ONE_SHOT_BYTES):
            ones = torch.ones(n_bytes // 4, device=device)
            if not bool((symmetric(ones) == group.size()).all()):
                works.zero_()
    except Exception:  # an unsupported topology, driver or build: each says so in its own way
        works.zero_()
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    return symmetric if symmetric is not None and bool(works.item()) else otherwise
