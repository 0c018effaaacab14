"""Time kernels beside a copy, or beside plain layers, on the same device."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from timeit import timeit

import torch
from torch import nn

from bench.dummy_prefill import randomise
from engine.sampling.noise import Stream, gumbel
from kv_cache import FullKVCache
from kv_cache.entries import SCORE_CHUNK
from models.attention import AttentionSpec, select_backend
from models.config import ModelConfig
from models.kernels.quantize import quantized_linear
from models.names import SCHEMES
from models.storage import KV_DTYPES
from reproduce.helpers.records import Record


def milliseconds(device: str, call: Callable[[], object]) -> float:
    """Return the median time of a call; on a GPU it runs in a graph, where no launch waits for the host."""
    call()  # the first call is slower
    if device == "cpu":
        return 1e3 * median(timeit(call, number=1) for _ in range(3))
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(call, return_mode="median")


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def copy_rate(device: str) -> float:
    """Return the bytes per ms that a copy within the device's memory reads and writes."""
    n_bytes = 2**22 if device == "cpu" else 2**31
    target, source = torch.ones(2, n_bytes, dtype=torch.uint8, device=device)
    return 2 * n_bytes / milliseconds(device, partial(target.copy_, source))


@torch.inference_mode()
def attention(
    device: str,
    backend: str,
    shapes: Sequence,
    tokens: Sequence[int],
    kv: Sequence[str] = ("same",),
    has_scores=False,
) -> Record:
    """Time a layer's attention over full rows, as a multiple of a copy of as many bytes. shapes: query and KV heads,
    head_dim, rows, entries a row. kv: storages of the entries. has_scores: scores of chunks are written, too."""
    rate, times = copy_rate(device), dict[str, float]()
    for storage, (*heads, batch, n_slot), n_token in itertools.product(kv, shapes, tokens):
        spec = AttentionSpec(*heads, None, dtype_of(device))
        kernel, why = select_backend(backend, device, spec)
        assert kernel.name == backend, why
        config = ModelConfig(8, 1, 64, *heads, 8, max_context=n_slot)
        cache = FullKVCache(config, batch, n_slot, device, KV_DTYPES.get(storage, spec.dtype))
        cache.positions.copy_(torch.arange(n_slot).expand(batch, -1))
        randomise(cache)
        q = torch.randn(batch, n_token, heads[0], heads[2], device=device).to(spec.dtype)
        prepared = kernel.prepare(spec, cache.positions[:, -n_token:].clone(), cache)
        to = torch.empty(batch, n_token, heads[1], -(-n_slot // SCORE_CHUNK), device=device) if has_scores else None
        ms = milliseconds(device, partial(kernel.attend, q, cache.read(0)._replace(chunk_scores=to), prepared))
        name = "{}/{} heads of {}, B {}, S {}, T {}, {} KV".format(*heads, batch, n_slot, n_token, storage)
        times[name] = ms * rate / cache.n_bytes
    worst = max(times, key=times.__getitem__)
    record = {"copy_tb_per_s": rate * 1e-9, "times_copy": times, "median_times_copy": median(times.values())}
    return record | {"worst_times_copy": times[worst], "worst": worst}


@torch.inference_mode()
def linears(device: str, shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> Record:
    """Time linear layers in 8 and 4 bits, and divide by layers in the model's dtype. shapes: outputs, inputs."""
    record, times = Record(), dict[tuple[str, int], float]()
    for (d_out, d_in), n_row in itertools.product(shapes, rows):
        plain = nn.Linear(d_in, d_out, bias=False, device=device, dtype=dtype_of(device))
        x = torch.randn(n_row, d_in, device=device).to(plain.weight.dtype)
        for name in ("plain", *SCHEMES):
            layer = plain if name == "plain" else quantized_linear(plain.weight, None, name)
            assert layer is not None
            times[name, n_row] = times.get((name, n_row), 0) + milliseconds(device, partial(layer, x))
    for (name, n_row), ms in times.items():
        record |= {f"{name}_ms_{n_row}": ms, f"{name}_over_plain_{n_row}": ms / times["plain", n_row]}
    return record


def noise(device: str, rows: int, tokens: int, n_ids: int) -> Record:
    """Time drawing a round's Gumbel numbers, and divide by a copy of as many bytes."""
    request, position = torch.arange(rows, device=device)[:, None], torch.arange(tokens, device=device)
    ms = milliseconds(device, partial(gumbel, request, request, position, Stream.COUPLED, n_ids))
    return {"noise_ms": ms, "times_copy": ms * copy_rate(device) / (2 * 4 * rows * tokens * n_ids)}
