"""Attention over a slot cache: one protocol, one file per backend, nothing imported before it is asked for."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from models.attention.torch_backend import TorchAttention


class AttentionBackend(Protocol):
    """Two calls: `prepare` once per forward, `attend` once per layer."""

    name: str

    def prepare(
        self,
        query_positions: Tensor,
        slot_positions: Tensor,
        group_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> Any:
        """Whatever the backend derives from `query_positions [B, T]` and `slot_positions [B, C]`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """`q [B, T, H, D]`, `k` and `v [B, C, Hkv, D]` -> `[B, T, H, D]`, scaled by `D ** -0.5`."""
        ...


BACKENDS = ("auto", "torch")


def select_backend(name: str = "auto") -> AttentionBackend:
    """The backend of that name; `auto` is the best one for this machine."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}, expected one of {BACKENDS}")
    return TorchAttention()


__all__ = ["BACKENDS", "AttentionBackend", "TorchAttention", "select_backend"]
