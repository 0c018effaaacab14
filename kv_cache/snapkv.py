"""SnapKV: the prompt's entries that its last queries attend to most, and recent tokens (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kv_cache.base import PromptEntries
from kv_cache.scored import ScoredPolicy

# Neighbours that an entry's score is averaged over, itself in the middle.
POOL = 5


def attention_received(queries: Tensor, keys: Tensor, is_hidden: Tensor) -> Tensor:
    """Return the attention that each entry gets from n queries, summed over queries and averaged over the heads of a
    group: `[..., n_kv_head, C]` float32, with a sum of n per head.

    queries: `[..., n_head, n, D]`, rotated like `keys [..., n_kv_head, C, D]`. is_hidden: the entries that a query does
    not see, `[..., n, C]` bool.
    """
    *batch, n_kv_head, n_token, head_dim = keys.shape
    n_query = queries.shape[-2]
    # The query heads of a group are rows of one product, so that keys are read once.
    products = queries.to(keys.dtype).reshape(*batch, n_kv_head, -1, head_dim) @ keys.mT
    scores = (products.float() * head_dim**-0.5).view(*batch, n_kv_head, -1, n_query, n_token)
    scores = scores.masked_fill(is_hidden[..., None, None, :, :], float("-inf"))
    return scores.softmax(dim=-1).sum(dim=-2).mean(dim=-2)


@dataclass(frozen=True)
class SnapKV(ScoredPolicy):
    """The entries that the prompt's last queries attend to, and recent tokens."""

    name: ClassVar[str] = "snapkv"

    @property
    def n_queries(self) -> int:
        return self.snapkv_window

    def score(self, prompt: PromptEntries) -> Tensor:
        """Return the attention that entries before the queries get, averaged over neighbours, so that the tokens around
        an important one are kept with it."""
        n_before, entries = prompt.length - prompt.queries.shape[1], prompt.positions
        votes = attention_received(prompt.queries, prompt.keys, entries > entries[n_before:, None])
        return torch.nn.functional.avg_pool1d(votes[:, :n_before], POOL, stride=1, padding=POOL // 2)
