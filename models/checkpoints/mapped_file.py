"""Reading tensors out of a memory-mapped checkpoint without keeping its pages in memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def copy_out(mapped: Tensor, part: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """`part`, a view of `mapped` or made from it, as a tensor of its own; the pages of `mapped` are given back.

    Without that, the resident set grows by the whole file, of which a shard may need a fraction.
    """
    is_view = part.untyped_storage().data_ptr() == mapped.untyped_storage().data_ptr()
    copied = part.to(device=device, dtype=dtype, copy=is_view, memory_format=torch.contiguous_format)
    if copied.is_cuda:
        torch.cuda.synchronize(copied.device)
    _give_back(mapped)
    return copied


def _give_back(mapped: Tensor) -> None:
    """Tell the kernel that these pages are not needed; read again, they would come from the file again."""
    if not hasattr(mmap, "MADV_DONTNEED"):  # a system without it keeps the pages until the file is unmapped
        return
    # Of the storage: a tensor with a stride of 0 is larger than what the file holds of it.
    storage = mapped.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
