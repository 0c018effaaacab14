"""VerifyTopKCache: the entries that verification attended to most, chosen anew as rounds go on (Vegas, PillarAttn)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kv_cache.base import Device, KVCache, KVShape
from kv_cache.entries import SCORE_CHUNK
from kv_cache.refreshed import Refreshed, RefreshedKVCache, VerificationScores


class VerifyTopKCache(RefreshedKVCache):
    """Keeps the chunks that the last verification attends to most (Vegas, arXiv 2602.07223; PillarAttn, arXiv
    2512.01278), by every token, with the last accepted token in place of rejected ones."""

    def new_scores(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        n_layer, max_batch, n_kv_head = self.keys.shape[:3]
        shape = n_layer, max_batch, n_token, n_kv_head, -(-capacity // SCORE_CHUNK)
        return VerificationScores(shape, self.device, torch.float32, as_shares=True)

    def chunk_shares(
        self, source: KVCache, lengths: Tensor, n_accepted: Tensor, seen: Tensor, layers: Sequence[int]
    ) -> Iterator[Tensor]:
        n_token = seen.shape[2]
        tokens = torch.arange(n_token, device=self.device)
        which = torch.minimum(tokens, n_accepted[:, None] - 1).clamp(min=0)
        # How often each token counts, `[B, 1, n_token]`: shares are summed by a product.
        counts = (which[..., None] == tokens).sum(dim=1, keepdim=True).float()
        for of_layer in seen:
            shares = of_layer[self.stored_rows]
            yield (counts @ shares.flatten(2)).unflatten(-1, shares.shape[2:])[:, 0]


@dataclass(frozen=True)
class VerifyTopK(Refreshed):
    """Sinks, recent tokens, and what verification attends to most, of a self-draft."""

    name: ClassVar[str] = "verify_topk"
    refresh: int = 1

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return VerifyTopKCache(config, max_batch, self, device, dtype)
