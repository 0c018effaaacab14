"""Compile launches of the Triton kernels, and read registers, shared memory and spills. Needs Triton, but no GPU."""

import io
import itertools
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from common.launch import Launch, Multiprocessors
from common.say import dtype_name
from engine.sampling import triton_draws
from kv_cache.entries import KV, LARGEST, SCORE_CHUNK, Packed
from kv_cache.full import Full
from kv_cache.quantized import QuantizedKVCache
from kv_cache.triton_choosing import plan_choice
from kv_cache.triton_packing import plan_packing
from kv_cache.verify_topk import VerifyTopK
from models.attention import triton_backend
from models.attention.base import AttentionSpec
from models.attention.triton_kernels import split_kv
from models.config import ModelConfig
from models.kernels import triton_int4, triton_quantize
from models.kernels.quantize import GROUP, UNIT

IN_4_BITS = "4 bits"
Record = dict[str, Any]
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table 30).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# Tokens and query heads of a KV head, by the number of query rows, their product.
BLOCKS = {16: (4, 4), 32: (8, 4), 64: (16, 4), 128: (16, 8)}
BATCH, N_KV_HEAD, N_IDS = 8, 8, 128256
NOTING = "in order, by name, noting"
# Caches that compile to different code: whether slots are in order, the sliding window, the number of slots.
CACHES = {
    "in order": (True, None, 32768),
    "in order, window": (True, 4096, 32768),
    "positions": (False, None, 32768),
    "one chunk": (False, None, 256),
    NOTING: (True, None, 32768),
    IN_4_BITS: (True, None, 32768),
}


def problem_of(kernel: Record) -> str | None:
    """Return why a compiled kernel is bad: spilled registers, or too much shared memory. None if it is good."""
    most, spilled = SHARED_LIMIT[kernel["arch"]], kernel["spill_stores"] + kernel["spill_loads"]
    memory = f"{kernel['shared']} bytes of shared memory of {most}, {spilled} spilled"
    text = f"sm_{kernel['arch']}, {kernel['variant']}: {memory}"
    return text if spilled or kernel["shared"] > most else None


def launches(
    dtype: torch.dtype, entries: torch.dtype, head_dim: int, n_row: int, cache: str, batch: int = BATCH, arch: int = 90
) -> list[Launch]:
    """Return the launches of an attention over one of CACHES on a GPU, on tensors without storage."""
    empty = partial(torch.empty, device="meta")
    (n_token, group), (in_order, window, n_slot) = BLOCKS[n_row], CACHES[cache]
    q = empty(batch, n_token, N_KV_HEAD * group, head_dim, dtype=dtype)
    stored = empty(batch, N_KV_HEAD, n_slot, head_dim, dtype=entries).transpose(1, 2)
    scales = empty(batch, N_KV_HEAD, n_slot).transpose(1, 2) if entries in LARGEST else None
    spec = AttentionSpec(N_KV_HEAD * group, N_KV_HEAD, head_dim, window, dtype)
    positions = empty(batch, n_slot, dtype=torch.int64)
    slots = SimpleNamespace(positions=positions, in_order=in_order, block_ends_view=False)
    block = triton_backend.TritonPrepared(spec, empty(batch, n_token, dtype=torch.int64), slots)
    kv = KV(stored, stored, scales, scales)
    if cache == NOTING:
        scores = empty(batch, n_token, N_KV_HEAD, n_slot // SCORE_CHUNK)
        kv = kv._replace(rows=empty(batch, dtype=torch.int64), chunk_scores=scores)
    if cache == IN_4_BITS:  # the default of `kv_cache.quantized`: packed entries next to a ring
        group, of_head = 16, (batch, N_KV_HEAD)
        codes = empty(*of_head, n_slot // group, head_dim // 2, group, dtype=torch.uint8)
        grids = empty(2, *of_head, n_slot // group, head_dim, dtype=torch.bfloat16)
        value_grids = empty(2, *of_head, head_dim // group, n_slot, dtype=torch.bfloat16)
        ring = empty(batch, 64 + 3 * group, dtype=torch.int64)
        packed = Packed(codes, codes.view(*of_head, n_slot, -1), grids, value_grids, n_slot, ring)
        kv = KV(*(x[:, : ring.shape[1]] for x in (stored, stored)), packed=packed)
    gpu = Multiprocessors(shared=SHARED_LIMIT[arch])
    with patch.object(triton_backend, "multiprocessors", lambda _: gpu):
        return triton_backend.plan(q, kv, block)[0]


def variants(arch: int) -> Iterator[tuple[str, Launch]]:
    """Yield every kind of launch with its name."""
    yield from other_variants()
    keys, scaled = torch.empty(BATCH, dtype=torch.int64, device="meta"), torch.empty(BATCH, 4, N_IDS, device="meta")
    yield "Gumbel numbers", triton_draws.plan_draw(keys, keys, keys, 0, N_IDS, scaled.dtype)[0]
    yield "uniform numbers", triton_draws.plan_draw(keys, keys, keys, 0, 1)[0]
    yield "filters", triton_draws.plan_filter(scaled, keys, keys.double())[0]
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float16), (64, 128)):
        stored = [dtype, torch.int8, torch.float8_e4m3fn]
        runs = [entries for entries in stored if triton_backend.runs_on(divmod(arch, 10), dtype, entries)]
        merge = None
        for entries, n_row, cache in itertools.product(runs, BLOCKS, CACHES):
            if cache == IN_4_BITS and entries != dtype:
                continue  # the ring next to the codes is stored like any cache
            each = launches(dtype, entries, head_dim, n_row, cache, arch=arch)
            splits = [launch for launch in each if launch.kernel is split_kv]
            merge = next(iter(each[len(splits) :]), merge)
            yield f"{dtype_name(dtype)}, {dtype_name(entries)} KV, {head_dim} x {n_row} rows, {cache}", splits[-1]
        if merge is not None:
            yield f"{dtype_name(dtype)}, {head_dim}, merge", merge


def other_variants() -> Iterator[tuple[str, Launch]]:
    """Yield launches of the kernels that score chunks, choose entries, pack 4 bits, and quantise, with their names."""
    empty, kinds = partial(torch.empty, device="meta"), [*itertools.product((64, 128), (torch.bfloat16, torch.int8))]
    for n_row in (16, 128):
        launch = launches(torch.bfloat16, torch.bfloat16, 128, n_row, NOTING)[-1]
        yield f"note, {launch.arguments['GROUP']} heads of a group", launch
    x, sums, scales = empty(64, 14336, dtype=torch.bfloat16), empty(64, 4096, dtype=torch.int32), empty(4096)
    yield "round activations", triton_quantize.plan_rows(x, 17)[0]
    yield "scale products", triton_quantize.plan_products(sums, scales, scales[:64], x.dtype)[0]
    for n_row, (d_out, d_in) in itertools.product((1, 32, 64, 128), ((28672, 4096), (4096, 14336), (960, 576))):
        packed = (
            empty(-(-d_in // UNIT), d_out, GROUP, dtype=torch.int16),
            empty(-(-d_in // GROUP), d_out, dtype=sums.dtype),
        )
        given, arrived = empty(n_row, d_in, dtype=x.dtype), empty(d_out // 64, dtype=sums.dtype)
        launch = triton_int4.plan_product(given, *packed, arrived, x.dtype)[0]
        yield f"multiply {n_row} rows by {d_out} x {d_in} in 4 bits", launch
    launch = triton_int4.plan_weights(*packed, d_in)[0]
    launch.arguments["IN_PAIRS"] = True
    yield "write weights in 4 bits", launch
    positions = empty(BATCH, dtype=torch.int64)
    for (head_dim, stored), n_slot in itertools.product(kinds, (4096, 32768, 131072)):
        config = ModelConfig(8, 1, 64, 32, N_KV_HEAD, head_dim, 8, n_slot)
        cache, full = (policy.new_cache(config, BATCH, n_slot, "meta", stored) for policy in (VerifyTopK(), Full()))
        launch = plan_choice(cache, 0, full, 0, empty(BATCH, N_KV_HEAD, n_slot // SCORE_CHUNK), positions)
        yield f"choose, {head_dim}, {dtype_name(stored)}, {n_slot} entries", launch
    for (head_dim, stored), group in itertools.product(kinds, (16, 64)):
        config = ModelConfig(8, 1, 64, 32, N_KV_HEAD, head_dim, 8, 9999)
        cache = QuantizedKVCache(config, BATCH, 9999, group, 64, "meta", stored)
        scales, packed = None if cache.scales is None else cache.scales[0], [x[0] for x in cache.packed]
        launch = plan_packing(cache.entries[0], scales, packed, positions, positions, (positions, cache.positions))
        yield f"pack, {head_dim}, {dtype_name(stored)}, groups of {group}", launch


def compile_launch(variant: str, launch: Launch, arch: int) -> Record:
    """Compile a launch for `sm_<arch>`, specialised to its arguments, and read the output of ptxas: registers of a
    thread, threads of a block, and bytes."""
    target, kernel, knobs, log = GPUTarget("cuda", arch, 32), launch.kernel, triton.knobs, io.StringIO()
    backend = make_backend(target)
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(backend, {}, *bound)
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    patterns = {"registers": r"Used (\d+) registers", "spill_stores": r"(\d+) bytes spill stores"}
    patterns |= {"spill_loads": r"(\d+) bytes spill loads"}
    found = {name: max(map(int, re.findall(text, log.getvalue()))) for name, text in patterns.items()}
    sizes = {"shared": compiled.metadata.shared, "threads": 32 * launch.num_warps}
    return {"variant": variant, "arch": arch, **found, **sizes}
