"""Whether a pass had the processors to itself: what it used of them, and what others did meanwhile."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

# In less time single interruptions decide, and the steps of the system's counters: 0.01 s of each processor.
LEAST_SECONDS = 2.0
# What others may take of the processors that the threads need: about this much leaves no trace among the differences
# of quiet runs. Steps take half as long again beside a little more, and many times as long beside one busy loop,
# since all threads wait for the one that it stops.
QUIET_PROCESSORS = 0.4
_BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class Usage:
    """Seconds of a while, by the clock; and processor time: this process's, that of all processes of the machine, and
    what its hypervisor gave to others."""

    host: str
    threads: int
    seconds: float
    own: float
    everyone: float
    stolen: float

    def since(self, before: Usage) -> Usage:
        return Usage(
            self.host,
            self.threads,
            self.seconds - before.seconds,
            self.own - before.own,
            self.everyone - before.everyone,
            self.stolen - before.stolen,
        )


def usage_so_far() -> Usage:
    """Since moments that stay the same: only differences mean something."""
    times = psutil.cpu_times()
    everyone = sum(getattr(times, name, 0.0) for name in _BUSY)
    stolen = getattr(times, "steal", 0.0)
    threads = torch.get_num_threads()
    return Usage(platform.node(), threads, time.perf_counter(), time.process_time(), everyone, stolen)


def contention(ranks: Sequence[Usage], on_cpu: bool) -> dict[str, Any]:
    """What the ranks' usage in one pass says, of the rank that was worst off.

    `cpu_share`: processor time per thread and second, and `contended`: whether others had processors that the threads
    needed, are of passes on CPUs; the second is None where the pass was too short to tell. `other_processors` and
    `stolen_processors`: how many others kept busy, on average.
    """
    other = max(_others(rank, ranks) for rank in ranks)
    stolen = max(rank.stolen / rank.seconds for rank in ranks)
    long_enough = min(rank.seconds for rank in ranks) >= LEAST_SECONDS
    return {
        "cpu_share": min(rank.own / (rank.seconds * rank.threads) for rank in ranks) if on_cpu else None,
        "other_processors": other,
        "stolen_processors": stolen,
        "contended": other + stolen > _spare(ranks) + QUIET_PROCESSORS if on_cpu and long_enough else None,
    }


def _others(rank: Usage, ranks: Sequence[Usage]) -> float:
    ours = sum(other.own for other in ranks if other.host == rank.host)
    return max(0.0, (rank.everyone - ours) / rank.seconds)


def _spare(ranks: Sequence[Usage]) -> int:
    """The processors that the threads of no rank need, on the host with the most threads."""
    threads = [sum(rank.threads for rank in ranks if rank.host == host) for host in {rank.host for rank in ranks}]
    return max(0, (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1) - max(threads))
