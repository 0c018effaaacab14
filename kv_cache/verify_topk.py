"""VerifyTopKCache: what verification itself attended to most, chosen anew as rounds go on (Vegas, PillarAttn)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kv_cache.base import Device, KVCache, KVShape
from kv_cache.entries import SCORE_CHUNK
from kv_cache.refreshed import Choice, Refreshed, RefreshedKVCache, SelectionOps, VerificationScores


class VerifyTopKCache(RefreshedKVCache):
    """Keeps the chunks that queries of the last verification attend to most (Vegas, arXiv 2602.07223; PillarAttn, arXiv
    2512.01278): of its first and of its last accepted token ("ends"), or of every token ("all"), the last accepted one
    in place of rejected ones."""

    def __init__(self, config: KVShape, max_batch: int, policy: VerifyTopK, device: Device, dtype: torch.dtype) -> None:
        super().__init__(config, max_batch, policy, device, dtype)
        self._by_ends = policy.score_queries == "ends"

    def observer(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        n_layer, max_batch, n_kv_head = self.keys.shape[:3]
        shape = n_layer, max_batch, n_token, n_kv_head, -(-capacity // SCORE_CHUNK)
        return VerificationScores(shape, self.device, torch.float32, as_shares=True)

    def choose(
        self, source: KVCache, lengths: Tensor, scores: VerificationScores, layers: Sequence[int], ops: SelectionOps
    ) -> None:
        if source.keys.shape[3] <= self.capacity:
            return
        n_accepted = (lengths - scores.starts[self.row_indices])[:, None]
        is_new = (n_accepted[:, 0] > 0) & (lengths > self.capacity)
        most = scores.seen.shape[2]
        which = torch.arange(most, device=self.device)[:: max(1, most - 1) if self._by_ends else 1]
        which = torch.minimum(which, n_accepted - 1).clamp(min=0)
        # How often each token is among them: shares are summed by a product.
        counts = (which[..., None] == torch.arange(most, device=self.device)).sum(dim=1).float()
        choice = Choice(self.stored_rows, counts, lengths - self.window, is_new)
        for to_layer, from_layer in enumerate(layers):
            ops.choose(self, to_layer, source, from_layer, scores.seen[to_layer], choice)


@dataclass(frozen=True)
class VerifyTopK(Refreshed):
    """Sinks, recent tokens, and what verification attends to most, of a self-draft."""

    name: ClassVar[str] = "verify_topk"
    refresh: int = 1
    score_queries: Literal["ends", "all"] = "all"
    """by which queries of a verification: its first and last token's that stand, or all"""

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return VerifyTopKCache(config, max_batch, self, device, dtype)
