"""The protocol that every attention backend follows."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kv_cache.entries import KV
from kv_cache.over import Slots

# Tokens per row up to which a block is decoded, drafted or verified; a longer one is a prefill chunk.
MAX_BLOCK = 16


@dataclass(frozen=True)
class AttentionSpec:
    """What all layers of a model, or of its shard, have in common."""

    n_head: int
    n_kv_head: int
    head_dim: int
    sliding_window: int | None
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.n_head // self.n_kv_head


class AttentionBackend(Protocol):
    """What a query sees is the cache's rule (`kv_cache.base`), and with a sliding window w only slots beyond `p - w`.

    `prepare`, once per forward: whatever the backend derives from the queries' positions `[B, T]` int64 and the slots
    of a cache. `attend`, once per layer: `q [B, T, H, D]` over entries of C slots -> `[B, T, H, D]`, scaled by
    `D ** -0.5`. Neither reads a tensor's content on the host, so both can be captured in a CUDA graph that stays valid
    whatever the rows' lengths become. `dequantizes`: whether blocks of that length turn entries that the backend was
    selected for, or tokens in 4 bits of groups of so many, into the model's dtype first, or copy rows that are read by
    name.
    """

    name: str

    def dequantizes(self, n_token: int, group: int | None = None) -> bool: ...
    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Any: ...
    def attend(self, q: Tensor, kv: KV, prepared: Any) -> Tensor: ...
