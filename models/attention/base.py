"""The protocol that every attention backend follows."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kv_cache.entries import KV
from kv_cache.views import SeenSlots, Slots

# The most tokens per row of a block that is decoded, drafted or verified; longer blocks are chunks of a prefill.
MAX_BLOCK = 16
# The slots that a forward runs over, or those of them that it sees.
AnySlots: TypeAlias = Slots | SeenSlots


@dataclass(frozen=True)
class AttentionSpec:
    """The shape of attention in every layer of a model or shard."""

    n_head: int
    n_kv_head: int
    head_dim: int
    sliding_window: int | None
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv_head


class AttentionBackend(Protocol):
    """An implementation of attention over the slots of a cache.

    The cache's rule (`kv_cache.base`) decides what a query at position p sees; a sliding window w also hides slots up
    to `p - w`. `prepare` and `attend` read no tensor on the host, so a CUDA graph of them stays valid as rows grow.
    """

    name: str

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Any:
        """Return the inputs of `attend` that all layers of a forward share. queries: positions, `[B, T]` int64."""

    def attend(self, q: Tensor, kv: KV, prepared: Any) -> Tensor:
        """Attend with `q [B, T, H, D]`, scaled by `D ** -0.5`, to the entries of C slots; return `[B, T, H, D]`."""
