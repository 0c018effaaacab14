"""Times of a round's phases, measured in a separate pass, because synchronising around phases inflates totals."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch


def synchronize(device: torch.device, timeout: timedelta | None = None) -> None:
    """Wait until the device has finished its work. Errors: RuntimeError after the timeout, for a GPU whose kernels wait
    for a lost rank: NCCL's timeout leaves out CUDA graphs, and symmetric memory has none."""
    if device.type != "cuda":
        return
    if timeout is None:
        torch.cuda.synchronize(device)
        return
    done, deadline = torch.cuda.Event(), time.monotonic() + timeout.total_seconds()
    done.record()
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a round on the GPU timed out after {timeout}")
        time.sleep(0)  # lets other threads run


class PhaseTimer:
    """A factory of context managers: `with timer("verify"): ...` appends seconds to `seconds["verify"]`."""

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._device, self._timeout = device, timeout

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronize(self._device, self._timeout)
        started = time.perf_counter()
        yield
        synchronize(self._device, self._timeout)
        self.seconds[name].append(time.perf_counter() - started)
