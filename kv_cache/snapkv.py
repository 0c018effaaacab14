"""SnapKV: the prompt's entries that its last queries attend to most, and recent tokens (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kv_cache.scored import ScoredPolicy

# Entries that an entry's score is shared with: as many before it as behind it, and itself.
POOL = 5


def attention_received(queries: torch.Tensor, keys: torch.Tensor, is_hidden: torch.Tensor) -> torch.Tensor:
    """What each entry gets of the attention of n queries, summed over them and averaged over heads.

    `queries [..., n_head, n, D]` and `keys [..., n_kv_head, C, D]`, rotated; `is_hidden [..., n, C]`: which of them a
    query does not see -> `[..., n_kv_head, C]` float32; a head's sum is n.
    """
    *batch, n_kv_head, n_token, head_dim = keys.shape
    n_query = queries.shape[-2]
    # The query heads of a group as rows of one product: keys are read once, and not copied for each.
    products = queries.to(keys.dtype).reshape(*batch, n_kv_head, -1, head_dim) @ keys.mT
    scores = (products.float() * head_dim**-0.5).view(*batch, n_kv_head, -1, n_query, n_token)
    scores = scores.masked_fill(is_hidden[..., None, None, :, :], float("-inf"))
    return scores.softmax(dim=-1).sum(dim=-2).mean(dim=-2)


@dataclass(frozen=True)
class SnapKV(ScoredPolicy):
    """What the prompt's last queries attend to, and recent tokens."""

    name: ClassVar[str] = "snapkv"

    @property
    def n_queries(self) -> int:
        return self.snapkv_window

    def score(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Rank the entries before the queries by the attention that they get, averaged over POOL neighbours, so that
        what surrounds a hit is kept with it."""
        n_before, n_token = keys.shape[1] - queries.shape[1], keys.shape[1]
        entries = torch.arange(n_token, device=keys.device)
        votes = attention_received(queries, keys, entries > entries[n_before:, None])
        return torch.nn.functional.avg_pool1d(votes[:, :n_before], POOL, stride=1, padding=POOL // 2)
