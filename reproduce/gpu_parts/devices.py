"""What a device gives at best: the bandwidth of a copy, the time of a function without launch costs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from reproduce.gpu_parts.cells import Options

WARM_UPS, REPEATS = 3, 15
COPY_BYTES = 4 * 2**30
# That of an H200, for a PyTorch that does not tell.
USUAL_L2_BYTES = 60 * 2**20
QUICK_COPY_BYTES = 2**24


class Timing(NamedTuple):
    """Seconds of one call, and how they were taken: "graph", "events" or "clock"."""

    seconds: float
    timed_by: str


def time_calls(calls: list[Callable[[], object]], options: Options) -> Timing:
    """Median seconds of one of `calls`, run one after the other; on a GPU as one CUDA graph.

    In a graph no launch waits for the host, as in the rounds of decoding. Where a call cannot be captured it
    is timed by events, which then include what the host takes to launch it.
    """
    for _ in range(WARM_UPS):
        for call in calls:
            call()
    if not options.on_cuda:
        return Timing(_by_clock(calls), "clock")
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:
        torch.cuda.synchronize()
        return Timing(_by_events(lambda: [call() for call in calls]) / len(calls), "events")
    graph.replay()
    return Timing(_by_events(graph.replay) / len(calls), "graph")


def _by_clock(calls: list[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


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
    seconds = _copy_seconds(n_bytes, options)
    if options.on_cuda:
        torch.cuda.empty_cache()  # what follows may need all of the memory
    return 2 * n_bytes / seconds


def _copy_seconds(n_bytes: int, options: Options) -> float:
    source = torch.ones(n_bytes, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return time_calls([lambda: target.copy_(source)], options).seconds


def l2_bytes(options: Options) -> int:
    """The second-level cache of a GPU; 0 on a CPU, whose bandwidth is not what this is about."""
    if not options.on_cuda:
        return 0
    return int(getattr(torch.cuda.get_device_properties(options.device), "L2_cache_size", USUAL_L2_BYTES))
