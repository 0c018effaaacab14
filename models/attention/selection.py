"""The fastest implementation of `kv_cache.refreshed.SelectionOps` next to an attention backend."""

import torch
from torch import Tensor

from common.launch import triton_reads
from kv_cache.base import KVCache
from kv_cache.refreshed import RefreshedKVCache, SelectionOps
from models.attention.base import AttentionBackend
from models.attention.cpp_backend import CppAttention
from models.kernels.calls import call


def selection_ops(backend: AttentionBackend, entries: Tensor) -> SelectionOps:
    """Return what selects from a cache of such entries: in C++ next to that backend, in Triton, or in PyTorch."""
    if isinstance(backend, CppAttention):
        return CppSelectionOps(backend)
    if triton_reads(entries):
        from kv_cache import triton_choosing

        if triton_choosing.is_right(entries.device, entries.dtype, entries.shape[-1]):
            return triton_choosing.TritonSelectionOps()
    return SelectionOps()


class CppSelectionOps(SelectionOps):
    """SelectionOps by the library of the C++ backend."""

    def __init__(self, backend: CppAttention) -> None:
        self._kernel = backend.kernel

    def best_chunks(self, share: Tensor, chunk: int, ends: Tensor, n_first: int, n_chosen: int) -> Tensor:
        chosen = torch.empty(*share.shape[:2], n_chosen, dtype=torch.int64)
        assert share.dtype == torch.float32 and share.stride(-1) == 1
        sizes = [*share.shape, *share.stride()[:2], chunk, n_chosen, n_first]
        call(self._kernel.foretoken_best_chunks, sizes, (share, ends, chosen))
        return chosen

    def copy_chosen(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, chosen: Tensor, is_new: Tensor
    ) -> None:
        """Copy the chosen entries that `to` lacks, or all of them if they have to be quantised; see `SelectionOps`."""
        narrows = (source.entries.dtype, to.entries.dtype) == (torch.float32, torch.bfloat16)
        if not narrows and source.entries.dtype != to.entries.dtype:
            return super().copy_chosen(to, to_layer, source, from_layer, chosen, is_new)
        assert chosen.is_contiguous() and chosen.shape[-1] == to.source_slots.shape[-1]
        read_rows, written_rows = source.row_indices.contiguous(), to.row_indices.contiguous()
        sizes = [*chosen.shape, source.capacity]
        call(self._kernel.foretoken_keep_chosen, sizes, (to.source_slots[to_layer], written_rows, chosen, is_new))
        pairs = [(source.entries[from_layer], to.entries[to_layer])]
        if source.scales is not None and to.scales is not None:
            pairs += [(source.scales[from_layer][..., None], to.scales[to_layer][..., None])]
        for read, written in pairs:
            strides = *read.stride()[:4], *written.stride()[:4]
            sizes = [read.element_size(), narrows, *chosen.shape, read.shape[-1], *strides]
            call(self._kernel.foretoken_copy_chosen, sizes, (read, written, read_rows, written_rows, chosen, is_new))
