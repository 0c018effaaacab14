"""What a device has: attention backends, a copy's bandwidth, the time of a function."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from timeit import timeit

import torch

from common.errors import ConfigError
from models.attention import AttentionBackend, AttentionSpec, select_backend
from models.attention.flash_backend import find_flavour
from reproduce.gpu_parts.cells import Options, Skip

COPY_BYTES, QUICK_COPY_BYTES = 4 * 2**30, 2**24


def backends(options: Options) -> list[str]:
    """Those for the device, the one that `auto` picks first; flash in the package that a run would take."""
    flash = ["flash"] if torch.cuda.is_available() and find_flavour(options.device)[0] else []
    return ["triton", *flash, "torch"] if options.on_cuda else ["cpp", "torch"]


def open_backend(name: str, device: str, spec: AttentionSpec) -> AttentionBackend:
    """Raises Skip with the reason why there is none."""
    try:
        backend, why = select_backend(name, device, spec)
    except ConfigError as error:
        raise Skip(f"{name} is not available: {error}") from None
    if backend.name != name:
        raise Skip(f"{name} does not take this: {why}")
    return backend


def time_calls(calls: Sequence[Callable[[], object]], options: Options) -> tuple[float, str]:
    """Median seconds of one of `calls`, run one after the other, and how they were taken: "graph", where no launch
    waits for the host, as in the rounds of decoding; "events", with the host's launches, of what a GPU cannot capture;
    "clock"."""

    def run_all() -> None:
        for call in calls:
            call()

    if not options.on_cuda:
        run_all()  # what is done for the first time takes longer
        return median(timeit(call, number=1) for call in calls), "clock"
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        ms, timed_by = do_bench_cudagraph(run_all, return_mode="median"), "graph"
    except Exception:
        torch.cuda.synchronize()
        ms, timed_by = do_bench(run_all, return_mode="median"), "events"
    return ms / 1e3 / len(calls), timed_by


@cache
def copy_bandwidth(options: Options) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    n_bytes = COPY_BYTES if options.on_cuda else QUICK_COPY_BYTES
    target, source = torch.ones(2, n_bytes, dtype=torch.uint8, device=options.device)
    seconds, _ = time_calls([partial(target.copy_, source)], options)
    del target, source
    if options.on_cuda:
        torch.cuda.empty_cache()  # what follows may need all of the memory
    return 2 * n_bytes / seconds


def l2_bytes(options: Options) -> int:
    """The second-level cache of a GPU; 0 on a CPU, whose bandwidth is not what this is about."""
    return torch.cuda.get_device_properties(options.device).L2_cache_size if options.on_cuda else 0
