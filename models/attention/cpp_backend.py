"""The `cpp` backend: a C++ kernel for CPUs that reads every key and value once."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache.entries import KV
from models.attention.base import AnySlots, AttentionSpec
from models.kernels.build import load_library
from models.kernels.calls import call

HEAD_DIMS = (64, 80, 96, 128)
# Dtypes of cache entries, at their numbers in the kernel.
ENTRIES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
# Slots per task. A constant: sums over a row's slots are always split at the same slots, so their bits do not depend on
# the batch, the block or the capacity.
PART = 1024
# Head dimensions are padded to a multiple of this number with zeros. Entries in 4 bits are unpacked first.
PADDED = 64
# The most numbers of a vector. Entries in 4 bits are unpacked first if their groups are no multiple of it.
LANES = 16


def unsupported(spec: AttentionSpec) -> str | None:
    """Return why a model cannot use this backend; None if it can."""
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.dtype not in (torch.float32, torch.bfloat16):
        return f"{spec.dtype}, not float32 or bfloat16"
    return None


class CppPrepared(NamedTuple):
    newest: Tensor  # position of each query, `[B, T]`
    window: int  # the most positions that a query sees; 0: all up to its position
    slots: Tensor  # positions of the slots, `[B, C]`


class CppAttention:
    """Attention of blocks of any length over entries in ENTRIES and in 4 bits.

    The bits of a token's result do not depend on other rows, other tokens of the block, or the capacity. Raises
    BuildError if the kernel cannot be built here.
    """

    name = "cpp"

    def __init__(self, kernel: ctypes.CDLL | None = None) -> None:
        self.kernel = kernel or load_library("attention")

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> CppPrepared:
        return CppPrepared(queries.contiguous(), spec.sliding_window or 0, slots.positions.contiguous())

    def attend(self, q: Tensor, kv: KV, prepared: CppPrepared) -> Tensor:
        batch, n_token, n_head, head_dim = q.shape
        padded = -(-head_dim // PADDED) * PADDED
        if kv.packed is not None and (kv.packed.group % LANES or head_dim != padded):
            kv = kv.unpacked(q.dtype)
        n_slot, n_kv_head = kv.keys.shape[1:3]
        slots, n_part = prepared.slots, -(-n_slot // PART)
        # `Call` in the kernel: sizes, then strides by row, head and slot.
        kinds = head_dim, ENTRIES.index(kv.keys.dtype), batch, n_kv_head, n_slot, n_token, n_head // n_kv_head
        sizes = [*kinds, *q.stride()[:3], q.dtype == torch.bfloat16]
        sizes += [tensor.stride(dim) for tensor in (kv.keys, kv.values) for dim in (0, 2, 1)]
        sizes += (0, 0) if kv.key_scales is None else (kv.key_scales.stride(0), kv.key_scales.stride(2))
        sizes += [PART, prepared.window, *((0, 0, 0) if kv.chunk_scores is None else kv.chunk_scores.stride()[:3])]
        packed: tuple[Tensor | None, ...] = (None,) * 5
        if kv.packed is None:
            sizes += [0] * 14
        else:
            n_part += -(-slots.shape[1] // PART)
            packed, slots = (*kv.packed[:4], slots), kv.packed.recent
            sizes += [kv.packed.n_token, kv.packed.group, kv.packed.value_grids.shape[3]]
            key_codes, value_codes, key_grids, value_grids = (tensor.stride() for tensor in kv.packed[:4])
            sizes += [*key_codes[:2], *value_codes[:2], *key_grids[:3], *value_grids[:4]]
        out = torch.empty(q.shape, dtype=q.dtype)
        partials = torch.empty(batch * n_head * n_part * n_token * (padded + 2), dtype=torch.float32)
        # The kernel reads entries of fewer bits in words of 32.
        assert all(step * kv.keys.element_size() % 4 == 0 for step in (*kv.keys.stride()[:3], *kv.values.stride()[:3]))
        assert kv.key_scales is None or kv.key_scales.stride(1) == 1
        assert q.stride(-1) == kv.keys.stride(-1) == kv.values.stride(-1) == 1 and kv.values.dtype == kv.keys.dtype
        read = q, kv.rows, kv.keys, kv.values, kv.key_scales, kv.value_scales, slots, prepared.newest
        call(self.kernel.foretoken_attend, sizes, (*read, *packed, partials, kv.chunk_scores, out))
        return out
