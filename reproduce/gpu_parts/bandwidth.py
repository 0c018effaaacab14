"""Part b: how fast each backend reads a KV cache, as a share of what a copy on the same device moves."""

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import median
from timeit import timeit
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from common.errors import ConfigError
from common.say import dtype_name
from engine.bench.dummy_prefill import randomise
from engine.bench.record import rounded
from kv_cache import FullKVCache, QuantizedKVCache
from models.attention import AttentionBackend, AttentionSpec, select_backend
from models.attention.flash_backend import find_flavour
from reproduce.gpu_parts.cells import IN_4_BITS, Cell, Options, Record, Skip, shared

# Of entries: None as the model computes.
Storage: TypeAlias = torch.dtype | Literal["4 bits"] | None
STORAGES: tuple[Storage, ...] = (None, torch.int8, IN_4_BITS)


class Shape(NamedTuple):
    """The attention of one layer of a model."""

    model: str
    n_head: int
    n_kv_head: int
    head_dim: int
    n_layer: int = 1

    def cache(self, options: Options, batch: int, n_slot: int, storage: Storage = None) -> FullKVCache:
        """A cache whose rows are full, of zeros; none of them in the ring beside 4 bits."""
        kind = QuantizedKVCache if storage == IN_4_BITS else FullKVCache
        dtype = storage if isinstance(storage, torch.dtype) else options.dtype
        cache = kind(self, batch, n_slot, device=options.device, dtype=dtype)
        cache.positions.copy_(torch.arange(n_slot, device=options.device).expand(batch, -1))
        return cache

    def spec(self, options: Options) -> AttentionSpec:
        return AttentionSpec(self.n_head, self.n_kv_head, self.head_dim, None, options.dtype)

    def block(self, options: Options, cache: FullKVCache, n_token: int) -> tuple[Tensor, Tensor]:
        """Queries `[B, T, H, D]` and their positions `[B, T]`: those of the cache's last tokens."""
        q = torch.randn(len(cache.positions), n_token, self.n_head, self.head_dim, device=options.device)
        return q.to(options.dtype), cache.positions[:, -n_token:].clone()


# Where a layer reads so much, a kernel has no excuse.
LARGE_BYTES = 250_000_000
COPY_BYTES, QUICK_COPY_BYTES = 4 * 2**30, 2**24
# Buffers are rotated until together they are so many times the second-level cache.
L2_MULTIPLE, MOST_BUFFERS = 16, 40


def cells(options: Options) -> list[Cell]:
    found = [Cell("b", "gpu_copy_bandwidth", "copy", partial(copy, options))]
    for each in options.sizes["shapes"]:
        shape = Shape(each["model"], *each["heads"])
        for (batch, n_slot), storage in itertools.product(each["batches"], STORAGES):
            kind = dtype_name(storage) if isinstance(storage, torch.dtype) else storage or "same"
            # 8 and 4 bits are read by our own kernels alone; the others dequantise the whole cache first.
            for backend in backends(options) if storage is None else backends(options)[:1]:
                for n_token in options.sizes["block_tokens"] if backend != "torch" else (1, 4):
                    name = f"{shape.model}, B {batch}, S {n_slot}, T {n_token}, {kind} KV, {backend}"
                    run = partial(attention, options, (shape, batch, n_slot, storage), backend, n_token)
                    found.append(Cell("b", "gpu_attention_bandwidth", name, run))
    return found


def copy(options: Options) -> Record:
    properties = torch.cuda.get_device_properties(options.device) if options.on_cuda else None
    record = {"bytes_per_second": copy_bandwidth(options), "l2_bytes": l2_bytes(options)}
    record |= {"multiprocessors": properties.multi_processor_count if properties else None}
    record |= {"memory_bytes": properties.total_memory if properties else None}
    return record | {"backends": backends(options), "flash": find_flavour(options.device)[1]}


def attention(options: Options, filled: tuple, name: str, n_token: int) -> Record:
    """The time of one layer's attention over full rows, and the bytes of KV that it has to read."""
    shape, batch, n_slot, storage = filled
    spec, calls = shape.spec(options), []
    backend, caches = open_backend(name, options.device, spec), _caches(options, *filled)
    for cache in caches:
        q, queries = shape.block(options, cache, n_token)
        calls.append(partial(backend.attend, q, cache.read(0), backend.prepare(spec, queries, cache)))
    # Enough calls that the first one of a graph, which waits for its launch, weighs little.
    seconds, timed_by = time_calls((calls * 8)[: max(len(calls), 8)], options)
    kv_bytes, bandwidth = caches[0].n_bytes, caches[0].n_bytes / seconds
    record = {"model": shape.model, "heads": shape[1:4], "B": batch, "S": n_slot, "T": n_token, "backend": name}
    kv_dtype = IN_4_BITS if storage == IN_4_BITS else dtype_name(caches[0].entries.dtype)
    record |= {"dtype": dtype_name(spec.dtype), "kv_dtype": kv_dtype, "kv_bytes": kv_bytes}
    record |= {"is_large": kv_bytes >= LARGE_BYTES, "buffers": len(caches), "timed_by": timed_by}
    record |= {"microseconds": 1e6 * seconds, "bytes_per_second": bandwidth}
    return rounded(record | {"share_of_copy": bandwidth / copy_bandwidth(options)})


@shared
@torch.inference_mode()
def _caches(options: Options, shape: Shape, batch: int, n_slot: int, storage: Storage) -> list[FullKVCache]:
    """Full caches of one layer, so many that no call finds its KV in the second-level cache."""
    caches: list[FullKVCache] = []
    wanted = L2_MULTIPLE * l2_bytes(options)
    while not caches or (len(caches) * caches[0].n_bytes < wanted and len(caches) < MOST_BUFFERS):
        caches.append(shape.cache(options, batch, n_slot, storage))
        randomise(caches[-1])
        if isinstance(cache := caches[-1], QuantizedKVCache):
            for codes_or_grids in cache.packed:
                codes_or_grids.random_(0, 16)
    return caches


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


@lru_cache
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
