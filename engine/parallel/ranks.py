"""The processes that torchrun started: which rank decides, and which ranks hold which model.

Rank 0 decides, and broadcasts tokens, counts and prompts, which are never computed twice. Where prompts are divided
over replicas, the first rank of each replica is its rank 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import RankError, flag, refuse, require_at_least
from common.process import LEADER, rank, world_size
from models.tensor_parallel import ModelRanks

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run or a replica; by default a single process, where every call returns its argument.

    device: where exchanged tensors are. check: compare a digest over ranks each round. first: the leader's number among
    all processes. group, timeout: of collectives, where there are several ranks.
    """

    rank: int = LEADER
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    check: bool = False
    first: int = LEADER
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    def broadcast(self, decide: Callable[[], Tensor], *shape: int) -> Tensor:
        """Return the leader's `decide()`, an int64 tensor of `shape`; other ranks do not call it."""
        if self.size == 1:
            return decide()
        tensor = decide().contiguous() if self.leads else torch.empty(shape, dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, group=self.group, group_src=LEADER)
        return tensor

    def broadcast_object(self, make: Callable[[], Value]) -> Value:
        """Return the leader's `make()`, a picklable object; other ranks do not call it."""
        if self.size == 1:
            return make()
        box = [make() if self.leads else None]
        dist.broadcast_object_list(box, group=self.group, group_src=LEADER)
        return box[0]  # type: ignore[return-value]

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return every rank's picklable `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Value | None] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values  # type: ignore[return-value]

    def require_same(self, what: Callable[[], str], tensors: Callable[[], Sequence[Tensor]]) -> None:
        """With `check`, raise RankError on every rank if any rank's tensors differ from the leader's."""
        if not self.check or self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors():
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digests = self.all_gather_object(digest.hexdigest()[:16])
        differing = [rank for rank, theirs in enumerate(digests) if theirs != digests[LEADER]]
        if differing:
            seen = ", ".join(f"{digests[rank]} on rank {self.first + rank}" for rank in (LEADER, *differing))
            named = ", ".join(str(self.first + rank) for rank in differing)
            fix = f"look at rank {named}: its machine, versions and checkpoint"
            raise RankError("ranks disagree", what(), f"digest {seen}", "the same on all ranks", fix)

    def replica(self, n_replicas: int) -> Ranks:
        """Return the ranks of this process's replica; each has consecutive ranks. Every rank has to call this."""
        if n_replicas == 1:
            return self
        size = self.size // n_replicas
        alone = replace(self, rank=self.rank % size, size=size, first=self.rank // size * size, group=None)
        return replace(alone, group=alone.new_group(range(size)))

    def new_group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Form a group of some ranks of each replica; None for a single rank. Every process has to form the same groups
        in the same order."""
        if len(members) == 1:
            return None
        if self.group is not None and len(members) == self.size:
            return self.group
        firsts = range(0, dist.get_world_size(), self.size)
        alike = [[first + member for member in members] for first in firsts]
        return dist.new_subgroups_by_enumeration(alike, timeout=self.timeout)[0]


ALONE = Ranks()


def model_ranks(ranks: Ranks, holders: Sequence[int]) -> ModelRanks:
    """Form the group of ranks that hold a model. Every process has to form the same groups in the same order."""
    members = sorted({LEADER, *holders})
    with_leader = ranks.new_group(members)
    holding = with_leader if LEADER in holders else ranks.new_group(sorted(holders))
    group, gather_group = (holding if ranks.rank in holders else None), (with_leader if ranks.rank in members else None)
    return ModelRanks(tuple(holders), ranks.rank, group, gather_group)


def require_single_process() -> None:
    """Raise ConfigError if torchrun started more than one process for a script that runs on one."""
    if world_size() > 1:
        what, fix = "this script runs on one process", "use --nproc_per_node=1, or run the script without torchrun"
        refuse("torchrun --nproc_per_node", f"{world_size()} processes", "1 process", what, fix)


def require_alike(store: dist.Store, facts: Mapping[str, str | None]) -> None:
    """Raise RankError on every rank, with each fact that differs and the ranks of its values, unless all ranks give the
    same facts. None: unknown on this rank. Every rank has to call this."""
    place = f"facts/{store.add(f'facts/{rank()}', 1)}"
    store.set(f"{place}/{rank()}", json.dumps(facts))
    by_rank = [json.loads(store.get(f"{place}/{number}")) for number in range(world_size())]
    differing = {}
    for name in {name: None for theirs in by_rank for name in theirs}:
        seen: dict[str, list[str]] = {}
        for number, theirs in enumerate(by_rank):
            if (value := theirs.get(name, "nothing")) is not None:
                seen.setdefault(value, []).append(str(number))
        if len(seen) > 1:
            differing[name] = ", ".join(f"{value} on rank {' '.join(numbers)}" for value, numbers in seen.items())
    if differing:
        store.set(f"{place}/{rank()}/read", "")
        for number in range(world_size()):  # the store may end with a rank
            store.get(f"{place}/{number}/read")
        seen_by_name = "; ".join(f"{name}: {values}" for name, values in differing.items())
        fix = "start all ranks with one command, one version of everything, and copies of the same checkpoints"
        raise RankError("ranks disagree", ", ".join(differing), seen_by_name, "the same on all ranks", fix)


def start_ranks(
    device: str,
    facts: Callable[[], Mapping[str, str | None]] | None = None,
    *,
    check: bool = False,
    timeout_seconds: float = 600,
) -> Ranks:
    """Join torchrun's other processes, over NCCL for tensors on GPUs, else over gloo; without torchrun, there is a
    single rank. A collective that waits longer than the timeout for a rank fails, and the run with it.

    facts: what ranks need to have in common. Errors: RankError, before any collective, where facts differ.
    """
    where = torch.device(device)
    if world_size() == 1:
        return Ranks(device=where)
    on_gpu, timeout = where.type == "cuda", timedelta(seconds=timeout_seconds)
    if on_gpu:
        torch.cuda.set_device(where)
    store, is_joined = None, dist.is_initialized()
    if facts is not None:
        if is_joined:
            store = dist.distributed_c10d._get_default_store()
        else:
            store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        require_alike(store, facts())
    if not is_joined:
        backend, device_id = ("cpu:gloo,cuda:nccl", where) if on_gpu else ("gloo", None)
        joining: Any = {"store": store, "rank": rank(), "world_size": world_size(), "timeout": timeout}
        dist.init_process_group(backend, device_id=device_id, **joining)
    return Ranks(dist.get_rank(), dist.get_world_size(), where, check, group=dist.group.WORLD, timeout=timeout)


def replica_group(n_replicas: int, group: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ranks of a replica in the order of the target's shards: `group`, or all by their number.

    Errors: ConfigError unless all replicas have as many ranks, and the group all of them.
    """
    require_at_least("data_parallel", n_replicas, 1)
    if world_size() % n_replicas:
        seen, required = f"{n_replicas} replicas, {world_size()} ranks", f"a multiple of {n_replicas} ranks"
        fix = f"start them with torchrun --nproc_per_node={n_replicas}, or leave out {flag('data_parallel')}"
        refuse("data_parallel", seen, required, "the ranks cannot be divided evenly", fix)
    ranks = range(world_size() // n_replicas)
    if group is not None and sorted(group) != [*ranks]:
        refuse("rank_group", [*group], f"each rank that runs once: {[*ranks]}", fix="leave it out")
    return tuple(ranks if group is None else group)


def check_draft_ranks(draft_ranks: Sequence[int] | None, group: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that hold the draft, in shard order. Errors: ConfigError unless the target's group has them."""
    ranks = tuple(group if draft_ranks is None else draft_ranks)
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(group):
        refuse("draft_ranks", [*ranks], f"some of the target's ranks, each once: {[*group]}")
    return ranks
