"""Whether a pass had the processors that its threads were ready to use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

# In less time single interruptions decide.
LEAST_SECONDS = 2.0
# Threads that wait at a time, on average, and processors that the hypervisor took. Passes of 4 and 2 threads on a quiet
# machine of 4 processors showed 0.02 at most, also beside work on processors that they left over; a thread that shared
# its processor with one other showed 0.5.
QUIET = 0.1


@dataclass(frozen=True)
class Usage:
    """Seconds of a while, by the clock; and processor seconds: those that this process had, those that its threads
    were ready for and did not get (None where the system does not tell), those that the hypervisor gave to others."""

    threads: int
    seconds: float
    had: float
    waited: float | None
    stolen: float

    def since(self, before: Usage) -> Usage:
        waited = None if self.waited is None or before.waited is None else self.waited - before.waited
        return Usage(
            self.threads,
            self.seconds - before.seconds,
            self.had - before.had,
            waited,
            self.stolen - before.stolen,
        )


def usage_so_far() -> Usage:
    """Since moments that stay the same: only differences mean something."""
    stolen = getattr(psutil.cpu_times(), "steal", 0.0)
    return Usage(torch.get_num_threads(), time.perf_counter(), time.process_time(), _waited(), stolen)


def _waited(threads: Path = Path("/proc/self/task")) -> float | None:
    """What Linux counts of every thread: other work, a processor shared with another thread, or a quota's end."""
    seconds = []
    for thread in threads.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            seconds.append(int(thread.read_text().split()[1]) / 1e9)
    return sum(seconds) if seconds else None


def contention(ranks: Sequence[Usage]) -> dict[str, Any]:
    """What the ranks' usage in one pass says, of the rank that was worst off.

    `cpu_share`: processor time per thread and second. `threads_waiting`, `stolen_processors`: on average.
    `contended`: None where the pass was too short, or the system cannot tell.
    """
    stolen = max(rank.stolen / rank.seconds for rank in ranks)
    waited = [rank.waited / rank.seconds for rank in ranks if rank.waited is not None]
    waiting = max(waited) if len(waited) == len(ranks) else None
    long_enough = min(rank.seconds for rank in ranks) >= LEAST_SECONDS
    return {
        "cpu_share": min(rank.had / (rank.seconds * rank.threads) for rank in ranks),
        "threads_waiting": waiting,
        "stolen_processors": stolen,
        "contended": waiting + stolen > QUIET if waiting is not None and long_enough else None,
    }
