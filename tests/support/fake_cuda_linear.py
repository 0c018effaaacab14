"""A stand-in for cuBLAS's products in 8 bits on CPU tensors, with its checks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.kernels import quantize


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Stand in for `torch._int_mm` of cuBLAS."""
    assert a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.int8 and a.shape[1] == b.shape[0]
    assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
    assert a.is_contiguous() and b.t().is_contiguous()
    return torch.ops.aten._int_mm(a, b)


@contextmanager
def cuda_linears(monkeypatch) -> Iterator[None]:
    """Build layers for a GPU within."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_int_mm", int_mm)
        patch.setattr(quantize, "runs_on_cpu", lambda weight: False)
        yield
