"""A backend that remembers the queries that pass through it, for cache policies that select by attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kv_cache.entries import KV
from models.attention.base import AttentionBackend, AttentionSpec, Slots


class ObservingAttention:
    """Attends as `backend` does; `queries` are those of each layer in order, `[B, T, H, D]`, rotated."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name = backend.name
        self.queries: list[Tensor] = []

    def dequantizes(self, n_token: int) -> bool:
        return self._backend.dequantizes(n_token)

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Any:
        return self._backend.prepare(spec, queries, slots)

    def attend(self, q: Tensor, kv: KV, prepared: Any) -> Tensor:
        self.queries.append(q)
        return self._backend.attend(q, kv, prepared)
