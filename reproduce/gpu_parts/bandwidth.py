"""Part b: how fast each backend reads a KV cache, as a share of what a copy on the same device moves."""

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from common.say import dtype_name
from engine.bench.dummy_prefill import randomise
from engine.bench.record import rounded
from kv_cache import FullKVCache
from models.attention import AttentionSpec
from models.attention.flash_backend import find_flavour
from reproduce.gpu_parts.cells import Cell, Options, Record, shared
from reproduce.gpu_parts.devices import backends, copy_bandwidth, l2_bytes, open_backend, time_calls


class Shape(NamedTuple):
    """The attention of one layer of a model."""

    model: str
    n_head: int
    n_kv_head: int
    head_dim: int
    n_layer: int = 1

    def cache(self, options: Options, batch: int, n_slot: int, storage: torch.dtype | None = None) -> FullKVCache:
        """A cache whose rows are full, of zeros."""
        cache = FullKVCache(self, batch, n_slot, device=options.device, dtype=storage or options.dtype)
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
# Buffers are rotated until together they are so many times the second-level cache.
L2_MULTIPLE, MOST_BUFFERS = 16, 40


def cells(options: Options) -> list[Cell]:
    found = [Cell("b", "gpu_copy_bandwidth", "copy", partial(copy, options))]
    for each in options.sizes["shapes"]:
        shape = Shape(each["model"], *each["heads"])
        for (batch, n_slot), storage in itertools.product(each["batches"], (None, torch.int8)):
            kind = dtype_name(storage) if storage else "same"
            # 8-bit entries are read by our own kernels alone; the others dequantise the whole cache first.
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
    shape, batch, n_slot, _ = filled
    spec, calls = shape.spec(options), []
    backend, caches = open_backend(name, options.device, spec), _caches(options, *filled)
    for cache in caches:
        q, queries = shape.block(options, cache, n_token)
        calls.append(partial(backend.attend, q, cache.read(0), backend.prepare(spec, queries, cache)))
    # Enough calls that the first one of a graph, which waits for its launch, weighs little.
    seconds, timed_by = time_calls((calls * 8)[: max(len(calls), 8)], options)
    kv_bytes, bandwidth = caches[0].n_bytes, caches[0].n_bytes / seconds
    record = {"model": shape.model, "heads": shape[1:4], "B": batch, "S": n_slot, "T": n_token, "backend": name}
    record |= {"dtype": dtype_name(spec.dtype), "kv_dtype": dtype_name(caches[0].entries.dtype), "kv_bytes": kv_bytes}
    record |= {"is_large": kv_bytes >= LARGE_BYTES, "buffers": len(caches), "timed_by": timed_by}
    record |= {"microseconds": 1e6 * seconds, "bytes_per_second": bandwidth}
    return rounded(record | {"share_of_copy": bandwidth / copy_bandwidth(options)})


@shared
@torch.inference_mode()
def _caches(options: Options, shape: Shape, batch: int, n_slot: int, storage: torch.dtype | None) -> list[FullKVCache]:
    """Full caches of one layer, so many that no call finds its KV in the second-level cache."""
    caches: list[FullKVCache] = []
    wanted = L2_MULTIPLE * l2_bytes(options)
    while not caches or (len(caches) * caches[0].n_bytes < wanted and len(caches) < MOST_BUFFERS):
        caches.append(shape.cache(options, batch, n_slot, storage))
        randomise(caches[-1])
    return caches
