"""Phase times, measured in a pass of their own because synchronising around phases inflates totals."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """A factory of context managers: `with timer("verify"): ...` appends seconds to `seconds["verify"]`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name].append(time.perf_counter() - started)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
