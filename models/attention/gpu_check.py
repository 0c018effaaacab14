"""Cases that compare attention kernels for GPUs, "triton" and "flash", with PyTorch."""

from collections.abc import Iterator
from itertools import product

import torch

from models.attention.base import AttentionBackend
from models.attention.check import BLOCKS, IN_4_BITS, SHAPES, cases_of
from models.attention.torch_backend import TorchAttention
from models.kernels.check import Case

DEVICE, DTYPE = "cuda", torch.bfloat16


def candidate(name: str) -> AttentionBackend:
    """Return the backend of that name. The fallback of flash is PyTorch here."""
    if name == "triton":
        from models.attention.triton_backend import TritonAttention

        return TritonAttention()
    from models.attention.flash_backend import FlashAttention, find_flavour

    flavour, why = find_flavour(DEVICE)
    assert flavour is not None, why
    return FlashAttention(flavour, TorchAttention())


def cases() -> Iterator[Case]:
    """Yield cases of ragged rows over entries in each storage: a single token, and a block."""
    for storage, shape, n_token in product((DTYPE, torch.int8, IN_4_BITS), SHAPES, BLOCKS[:2]):
        yield cases_of(DTYPE, storage, shape, n_token, DEVICE)[0]
