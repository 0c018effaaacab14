"""Contention: measures whether a pass had the processors that its threads were ready to use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# Shorter passes get no verdict: single interruptions would decide it.
LEAST_SECONDS = 2.0
# Threads waiting plus processors stolen, on average: measured 0.02 at most on a quiet machine of 4 processors, also
# next to work on other processors, and 0.5 for a thread that shared its processor with another.
QUIET = 0.1
# Seconds that a thread may wait whenever it is woken: measured 0.0001 or 0.0002 where a processor is idle, 0.004 where
# another thread has it.
WAKING = 0.0005


@dataclass(frozen=True)
class Usage:
    """Seconds by the clock, and processor seconds that this process did not get.

    waits: by thread, the seconds that it was ready and waited, beyond waking; empty where the system does not count
    them. stolen: the seconds that the hypervisor gave to other machines.
    """

    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    stolen: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        waits = {name: self.waits.get(name, 0) + other.waits.get(name, 0) for name in self.waits | other.waits}
        return Usage(self.seconds + other.seconds, waits, self.stolen + other.stolen)

    @property
    def waiting(self) -> float | None:
        """The number of threads that waited at a time, on average."""
        return max(0.0, sum(self.waits.values())) / self.seconds if self.waits else None

    def since(self, before: Usage) -> Usage:
        """Return the usage since `before`, of threads that still exist."""
        waits = {name: waited - before.waits.get(name, 0.0) for name, waited in self.waits.items()}
        return Usage(self.seconds - before.seconds, waits, self.stolen - before.stolen)


def usage_so_far() -> Usage:
    """Return the usage since fixed moments: only differences mean something."""
    return Usage(time.perf_counter(), _waits(), getattr(psutil.cpu_times(), "steal", 0.0))


def _waits(threads: Path = Path("/proc/self/task")) -> dict[str, float]:
    waits = {}
    for thread in threads.glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has just ended
            _, waited, n_turn = map(int, thread.read_text().split())
            waits[thread.parent.name] = waited / 1e9 - WAKING * n_turn
    return waits


def contention(ranks: Sequence[Usage]) -> dict[str, Any]:
    """Return a pass's record entries, by the rank that waited most. `contended` is None if the pass was too short or
    the system does not count."""
    stolen, waits = max(rank.stolen / rank.seconds for rank in ranks), [rank.waiting for rank in ranks]
    waiting = None if None in waits else max(filter(None, waits), default=0.0)
    long_enough = min(rank.seconds for rank in ranks) >= LEAST_SECONDS
    contended = waiting + stolen > QUIET if waiting is not None and long_enough else None
    return {"threads_waiting": waiting, "stolen_processors": stolen, "contended": contended}
