"""Files of torch.save: damage that torch.load does not look for, and mapped pages that it would keep in memory."""

import ctypes
import mmap
import zipfile
from pathlib import Path

import torch
from torch import Tensor

END, END_BYTES = b"PK\x05\x06", 22  # how the record begins that closes a zip archive, and its size without a comment


def check_archive(path: Path) -> bool:
    """Compare a zip archive with the check sums in it, if it has any; False for what is no archive.

    Raises ValueError or zipfile.BadZipFile if it is damaged.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        if any(record.CRC for record in archive.infolist()) and (damaged := archive.testzip()):
            raise ValueError(f"{damaged} is damaged")
    with path.open("rb") as file:
        file.seek(-END_BYTES, 2)
        if not file.read().startswith(END):
            raise ValueError("bytes follow the archive")
    return True


def copy_out(mapped: Tensor, part: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """`part`, a view of `mapped` or made from it, as a tensor of its own; the pages of `mapped` are given back.

    Without that, the resident set grows by the whole file, of which a shard may need a fraction.
    """
    # Of the storage: a tensor with a stride of 0 is larger than what the file holds of it.
    storage = mapped.untyped_storage()
    is_view = part.untyped_storage().data_ptr() == storage.data_ptr()
    copied = part.to(device=device, dtype=dtype, copy=is_view, memory_format=torch.contiguous_format)
    if copied.is_cuda:
        torch.cuda.synchronize(copied.device)
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first and hasattr(mmap, "MADV_DONTNEED"):  # a system without it keeps them until the file is unmapped
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
    return copied
