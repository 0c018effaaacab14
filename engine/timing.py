"""Phase times, measured in a pass of their own because synchronising around phases inflates totals."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PhaseTimer:
    """A factory of context managers: `with timer("verify"): ...` appends seconds to `seconds["verify"]`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronize(self._device)
        started = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds[name].append(time.perf_counter() - started)
