"""What a device gives at best: the bandwidth of a copy, the time of a function without launch costs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from reproduce.gpu_parts.cells import Options

WARM_UPS, REPEATS = 3, 15
COPY_BYTES, QUICK_COPY_BYTES = 4 * 2**30, 2**24
# That of an H200, for a PyTorch that does not tell.
USUAL_L2_BYTES = 60 * 2**20


class Timing(NamedTuple):
    """Seconds of one call, and how they were taken: "graph", "events" or "clock"."""

    seconds: float
    timed_by: str


def time_calls(calls: Sequence[Callable[[], object]], options: Options) -> Timing:
    """Median seconds of one of `calls`, run one after the other; on a GPU as one CUDA graph.

    In a graph no launch waits for the host, as in the rounds of decoding. Where a call cannot be captured it
    is timed by events, which then include what the host takes to launch it.
    """

    def run_all() -> None:
        for call in calls:
            call()

    for _ in range(WARM_UPS):
        run_all()
    if not options.on_cuda:
        return Timing(median(map(_clocked, calls)), "clock")
    torch.cuda.synchronize()
    run, timed_by = run_all, "events"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        graph.replay()
        run, timed_by = graph.replay, "graph"
    except Exception:
        torch.cuda.synchronize()
    return Timing(_by_events(run) / len(calls), timed_by)


def _clocked(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _by_events(run: Callable[[], object]) -> float:
    """Median seconds of one `run` on the device."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


@functools.cache
def copy_bandwidth(options: Options) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    n_bytes = COPY_BYTES if options.on_cuda else QUICK_COPY_BYTES
    target, source = torch.ones(2, n_bytes, dtype=torch.uint8, device=options.device)
    seconds = time_calls([partial(target.copy_, source)], options).seconds
    del target, source
    if options.on_cuda:
        torch.cuda.empty_cache()  # what follows may need all of the memory
    return 2 * n_bytes / seconds


def l2_bytes(options: Options) -> int:
    """The second-level cache of a GPU; 0 on a CPU, whose bandwidth is not what this is about."""
    if not options.on_cuda:
        return 0
    return int(getattr(torch.cuda.get_device_properties(options.device), "L2_cache_size", USUAL_L2_BYTES))
