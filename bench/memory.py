"""Checks that a run fits into memory: weights and KV entries before loading, activations after it."""

import math
import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bench.plan import Plan
from common.errors import OutOfMemoryError, flag
from common.process import local_world_size
from engine.runner import ModelRunner

GIB = 2**30
# Kept free on a GPU before anything is loaded, for activations, CUDA and NCCL: bytes, and a share for small GPUs.
RESERVE_BYTES, RESERVED_SHARE = 4 * GIB, 0.1
# Measured activations count this many times, since sampling, choosing entries and captured rounds need memory, too.
MARGIN = 1.5
# What makes an item smaller.
FIXES = {
    "weights": f"{flag('quantize')}, a narrower {flag('dtype')} or more ranks",
    "draft weights": f"{flag('draft_weights')} same with a self-draft, or a smaller draft",
    "reserve": f"another {flag('device')}",
    "target KV": f"a shorter {flag('prefix_len')}, or entries of the target in 8 bits ({flag('kv_dtype')} int8)",
    "target KV in 8 bits": f"a shorter {flag('prefix_len')}",
    "draft KV": f"a smaller {flag('draft_budget')}",
    "activations of a prompt": f"a shorter {flag('prefix_len')}",
    "activations of rows": f"a shorter {flag('prefix_len')}",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by name on the rank with the largest shard. fixed: whatever the batch. per_row: of each row."""

    fixed: dict[str, int]
    per_row: dict[str, int]

    def items(self, batch: int) -> dict[str, int]:
        return self.fixed | {name: batch * size for name, size in self.per_row.items()}

    def total(self, batch: int) -> int:
        return sum(self.items(batch).values())

    def largest_batch(self, available: int) -> int:
        """Return the largest batch whose total is within `available` bytes; 0 if none is."""
        return max(0, (available - self.total(0)) // max(1, sum(self.per_row.values())))


def memory_plan(plan: Plan) -> MemoryPlan:
    """Return the bytes of all weights and KV entries, and a reserve on a GPU."""
    target = plan.target
    drafts = [draft.n_bytes(target, plan.chooses) for draft in plan.candidates]
    of_target, kv = target.n_bytes()
    of_models = sum({model: size for weights, _ in drafts for model, size in weights.items()}.values())
    of_drafts = sum(sorted((per_row for _, per_row in drafts), reverse=True)[: plan.n_resident])
    reserve = 0 if plan.target.device.startswith("cpu") else RESERVE_BYTES
    fixed = {"weights": of_target, "draft weights": of_models, "reserve": reserve}
    of_entries = f"target KV{' in 8 bits' * (target.kv_dtype.itemsize == 1)}"
    return MemoryPlan(fixed, {of_entries: kv, "draft KV": of_drafts})


def require_room(plan: Plan) -> None:
    """Raise OutOfMemoryError, before loading, if weights and KV entries do not fit."""
    available, needed = available_bytes(plan.target.device), memory_plan(plan)
    needed.fixed["reserve"] = min(needed.fixed["reserve"], int(RESERVED_SHARE * available))
    require_memory(needed, plan.target.n_rows, available, plan.target.device)


@torch.inference_mode()
def require_room_to_run(plan: Plan, runner: ModelRunner) -> None:
    """Raise OutOfMemoryError, after loading, if KV entries and activations do not fit.

    Activations are measured where attention needs most: in the last chunk of the longest prompt, and in a block of
    every row at the end of its slots.
    """
    cache, n_token = runner.cache, plan.gamma + 1
    longest = cache.capacity - n_token
    block = torch.zeros((runner.max_batch, n_token), dtype=torch.int64, device=runner.device)
    positions = torch.arange(longest, cache.capacity, device=runner.device).expand_as(block)
    last_chunk = max(0, longest - runner.prefill_chunk)
    of_chunk = _peak_bytes(runner.device, lambda: runner.extend_row(0, [0] * longest, last_chunk))
    of_rows = _peak_bytes(runner.device, lambda: runner.step(block, positions))
    for row in range(runner.max_batch):
        cache.reset_row(row)
    per_row = {"activations of rows": math.ceil(MARGIN * of_rows / runner.max_batch)}
    # A CPU's pages are taken when they are first written; a GPU's cache is in memory already, and any in a limit.
    untouched = plan.target.device == "cpu" and left_in_limits() == math.inf
    per_row |= {name: n for name, n in memory_plan(plan).per_row.items() if name == "draft KV" or untouched}
    needed = MemoryPlan({"activations of a prompt": math.ceil(MARGIN * of_chunk)}, per_row)
    require_memory(needed, plan.target.n_rows, available_bytes(plan.target.device), plan.target.device)


def _peak_bytes(device: torch.device, forward: Callable[[], object]) -> int:
    """Return by how many bytes a forward raises the memory in use; all available bytes if it runs out of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: the peak begins anew at what is resident now
            Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_bytes(device)
    try:
        forward()
    except RuntimeError as error:  # of a CPU, without a type of its own
        if "allocate" not in str(error):
            raise
        return available_bytes(str(device))
    return peak_memory_bytes(device) - before


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of bytes in use: allocated on a GPU since it was last reset; resident with libraries on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_bytes(device: str) -> int:
    """Return the bytes that this process may take on a CUDA device, or on "cpu" its share of the machine's, within its
    own limits."""
    if device == "cpu":
        share = min(psutil.virtual_memory().available, left_in_container()) / local_world_size()
        return int(min(share, left_in_limits()))
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(torch.device(device))[0] + reserved


def left_in_limits() -> float:
    """Return the bytes that `ulimit -v` and `ulimit -d` leave to this process; inf: no limit."""
    used = psutil.Process().memory_info()
    limits = (resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))
    soft = ((resource.getrlimit(limit)[0], size) for limit, size in limits)
    return min((most - size for most, size in soft if most != resource.RLIM_INFINITY), default=math.inf)


def left_in_container(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that control groups (v2) leave to this process, file pages counted as free; inf: no limit."""
    left = math.inf
    with suppress(OSError):
        path = membership.read_text().rpartition("::")[2].strip().lstrip("/")
        for group in (groups / path, *(groups / path).parents):
            with suppress(OSError, ValueError):  # ValueError: "max" stands for no limit
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                stat = (group / "memory.stat").read_text()
                file_bytes = re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)
                left = min(left, limit - used + sum(map(int, file_bytes)))
    return left


def require_memory(plan: MemoryPlan, batch: int, available: int, device: str) -> None:
    """Raise OutOfMemoryError if a plan of memory does not fit: with each item, the largest batch that fits, and what
    makes the largest item smaller, which may not suffice."""
    needed = plan.total(batch)
    if needed <= available:
        return
    items = plan.items(batch)
    copies = "draft weights"  # the run may fit without them
    smaller = FIXES[copies if needed - items.get(copies, 0) <= available else max(items, key=items.__getitem__)]
    largest = plan.largest_batch(available)
    fix = f"use {flag('B')} {largest}, which fits, or try {smaller}" if largest else f"use {smaller}"
    listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in items.items() if size)
    what, seen = "the run does not fit into memory", f"{needed / GIB:.2f} GiB for a batch of {batch}"
    raise OutOfMemoryError(what, f"{device}: {listed}", seen, f"<= {available / GIB:.2f} GiB available", fix)
