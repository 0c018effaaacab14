"""The `cpp` backend: a kernel of our own for CPUs, which reads every key and value once."""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache.base import KVCache
from kv_cache.entries import KV
from kv_cache.verify_topk import Choosing, VerifyTopKCache
from models.attention.base import AttentionSpec, Slots
from models.cpp_build import load_library

HEAD_DIMS = (64, 128)
# By the number that the kernel knows them by: all that a model in float32 or bfloat16 may have in a cache.
ENTRIES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
# Slots per task. A constant, not a share of the capacity: sums over a row's slots are then cut in the same
# places whatever the batch, the block or the capacity is, and come out the same to the last bit.
PART = 1024
# A vector's numbers at most: where tokens in 4 bits share no grid of as many, they are unpacked first.
LANES = 16


@functools.cache
def load_kernel() -> ctypes.CDLL:
    return load_library("attention")


def unsupported(spec: AttentionSpec) -> str | None:
    """Why a model cannot use this backend; None if it can."""
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim}, not {' or '.join(map(str, HEAD_DIMS))}"
    if spec.dtype not in (torch.float32, torch.bfloat16):
        return f"{spec.dtype}, not float32 or bfloat16"
    return None


class Prepared(NamedTuple):
    newest: Tensor  # position of each query, and the last that it sees, `[B, T]`
    window: int  # how many positions a query sees at most, its own included; 0: all before it
    slots: Tensor  # their positions `[B, C]`


class CppAttention(Choosing):
    """Blocks of any length over entries of any kind in ENTRIES, and of 4 bits beside them. A row's result does not
    depend, to the last bit, on the other rows, the other tokens of the block, or the capacity. Errors: BuildError if it
    cannot be built here.
    """

    name = "cpp"

    def __init__(self, kernel: ctypes.CDLL | None = None) -> None:
        self._kernel = kernel or load_kernel()

    def dequantizes(self, n_token: int, group: int | None = None) -> bool:
        return group is not None and group % LANES > 0

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Prepared:
        return Prepared(queries.contiguous(), spec.sliding_window or 0, slots.positions.contiguous())

    def attend(self, q: Tensor, kv: KV, prepared: Prepared) -> Tensor:
        if kv.packed is not None and self.dequantizes(q.shape[1], kv.packed.group):
            kv = kv.unpacked(q.dtype)
        batch, n_token, n_head, head_dim = q.shape
        n_slot, n_kv_head = kv.keys.shape[1:3]
        slots, n_part = prepared.slots, -(-n_slot // PART)
        # The kernel's `Layout`: sizes, then strides by row, head and slot.
        sizes = [batch, n_kv_head, n_slot, n_token, n_head // n_kv_head, *q.stride()[:3], q.dtype == torch.bfloat16]
        scales = kv.key_scales if kv.key_scales is not None else kv.keys[..., 0]
        sizes += [tensor.stride(dim) for tensor in (kv.keys, kv.values, scales) for dim in (0, 2, 1)]
        sizes += [PART, prepared.window, *((0, 0, 0) if kv.noted is None else kv.noted.stride()[:3])]
        of_packed: tuple[Tensor | None, ...] = (None,) * 5
        if kv.packed is None:
            sizes += [0] * 14
        else:
            n_part += -(-slots.shape[1] // PART)
            of_packed, slots = (*kv.packed[:4], slots), kv.packed.recent
            sizes += [kv.packed.n_token, kv.packed.group, kv.packed.value_grids.shape[3]]
            key_codes, value_codes, key_grids, value_grids = (one.stride() for one in kv.packed[:4])
            sizes += [*key_codes[:2], *value_codes[:2], *key_grids[:3], *value_grids[:4]]
        out = torch.empty(q.shape, dtype=q.dtype)
        partials = torch.empty(batch * n_head * n_part * n_token * (head_dim + 2), dtype=torch.float32)
        # Entries of fewer bits are read in words of 32.
        assert all(step * kv.keys.element_size() % 4 == 0 for step in (*kv.keys.stride()[:3], *kv.values.stride()[:3]))
        assert q.stride(-1) == kv.keys.stride(-1) == kv.values.stride(-1) == 1 and kv.values.dtype == kv.keys.dtype
        layout, kinds = (ctypes.c_int64 * len(sizes))(*sizes), (head_dim, ENTRIES.index(kv.keys.dtype))
        read = q, kv.rows, kv.keys, kv.values, kv.key_scales, kv.value_scales, slots, prepared.newest
        tensors = map(_pointer, (*read, *of_packed, partials, out, kv.noted))
        threads = ctypes.c_int(torch.get_num_threads())
        failed = self._kernel.foretoken_attend(layout, *map(ctypes.c_int64, kinds), *tensors, threads)
        assert not failed, f"head_dim {head_dim} and {kv.keys.dtype} entries were checked before"
        return out

    def best_chunks(self, share: Tensor, chunk: int, ends: Tensor, n_first: int, n_chosen: int) -> Tensor:
        chosen = torch.empty(*share.shape[:2], n_chosen, dtype=torch.int64)
        sizes = [*share.shape, *share.stride()[:2], chunk, n_chosen, n_first]
        layout, threads = (ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_int(torch.get_num_threads())
        assert share.dtype == torch.float32 and share.stride(-1) == 1
        self._kernel.foretoken_best_chunks(layout, *map(_pointer, (share, ends, chosen)), threads)
        return chosen

    def copy_chosen(
        self, to: VerifyTopKCache, to_layer: int, source: KVCache, from_layer: int, chosen: Tensor, is_new: Tensor
    ) -> None:
        """As of `Choosing`; where nothing is quantised anew, of what `to` lacks."""
        narrows = (source.entries.dtype, to.entries.dtype) == (torch.float32, torch.bfloat16)
        if not narrows and source.entries.dtype != to.entries.dtype:
            return super().copy_chosen(to, to_layer, source, from_layer, chosen, is_new)
        assert chosen.is_contiguous() and chosen.shape[-1] == to.held.shape[-1]
        threads = ctypes.c_int(torch.get_num_threads())
        sizes = [*chosen.shape, source.capacity]
        layout = (ctypes.c_int64 * len(sizes))(*sizes)
        places = to.held[to_layer], to.row_indices.contiguous(), chosen, is_new
        self._kernel.foretoken_keep_chosen(layout, *map(_pointer, places), threads)
        pairs = [(source.entries[from_layer], to.entries[to_layer])]
        if source.scales is not None and to.scales is not None:
            pairs += [(source.scales[from_layer][..., None], to.scales[to_layer][..., None])]
        for read, written in pairs:
            sizes = [*chosen.shape, read.shape[-1], *read.stride()[:4], *written.stride()[:4]]
            layout, of = (ctypes.c_int64 * len(sizes))(*sizes), (read.element_size(), narrows)
            tensors = read, written, source.row_indices.contiguous(), to.row_indices.contiguous(), chosen, is_new
            self._kernel.foretoken_copy_chosen(layout, *map(ctypes.c_int64, of), *map(_pointer, tensors), threads)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
