"""Compile launches of the Triton kernels, and read registers, shared memory and spills. Needs Triton, but no GPU."""

import io
import re
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from common.launch import Launch, Multiprocessors
from kv_cache.entries import KV, LARGEST, Packed
from models.attention import triton_backend
from models.attention.base import AttentionSpec

# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table 30).
SHARED_LIMIT = {86: 99 * 1024, 90: 227 * 1024}


def launches(
    entries: torch.dtype, n_token: int = 4, batch: int = 8, in_order: bool = True, in_4_bits: bool = False, sm: int = 90
) -> list[Launch]:
    """Return the launches of an attention of bfloat16 queries, 4 to a KV head, on tensors without storage."""
    empty, dtype, head_dim, n_slot = partial(torch.empty, device="meta"), torch.bfloat16, 128, 32768
    of_head = batch, n_kv_head = batch, 8
    q = empty(batch, n_token, n_kv_head * 4, head_dim, dtype=dtype)
    stored = empty(*of_head, n_slot, head_dim, dtype=entries).transpose(1, 2)
    scales = empty(*of_head, n_slot).transpose(1, 2) if entries in LARGEST else None
    slots = SimpleNamespace(positions=empty(batch, n_slot, dtype=torch.int64), in_order=in_order, block_ends_view=False)
    spec = AttentionSpec(n_kv_head * 4, n_kv_head, head_dim, None, dtype)
    block = triton_backend.TritonPrepared(spec, empty(batch, n_token, dtype=torch.int64), slots)
    kv = KV(stored, stored, scales, scales)
    if in_4_bits:  # the default of `kv_cache.quantized`: packed entries next to a ring
        group = 16
        codes = empty(*of_head, n_slot // group, head_dim // 2, group, dtype=torch.uint8)
        grids = empty(2, *of_head, n_slot // group, head_dim, dtype=dtype)
        value_grids = empty(2, *of_head, head_dim // group, n_slot, dtype=dtype)
        ring = empty(batch, 64 + 3 * group, dtype=torch.int64)
        packed = Packed(codes, codes.view(*of_head, n_slot, -1), grids, value_grids, n_slot, ring)
        kv = KV(*(x[:, : ring.shape[1]] for x in (stored, stored)), packed=packed)
    gpu = Multiprocessors(shared=SHARED_LIMIT[sm])
    with patch.object(triton_backend, "multiprocessors", lambda _: gpu):
        return triton_backend.plan(q, kv, block)[0]


def require_good(launch: Launch, arch: int) -> None:
    """Compile a launch for `sm_<arch>`, specialised to its arguments; require of the output of ptxas that its block
    fits into shared memory, and that no register is spilled."""
    target, kernel, knobs, log = GPUTarget("cuda", arch, 32), launch.kernel, triton.knobs, io.StringIO()
    backend = make_backend(target)
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(backend, {}, *bound)
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    said = log.getvalue()
    assert max(map(int, re.findall(r"Used (\d+) registers", said))) > 16, said
    assert {*re.findall(r"(\d+) bytes spill", said)} == {"0"}, said
    assert 0 < compiled.metadata.shared <= SHARED_LIMIT[arch]
