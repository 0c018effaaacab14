"""SnapKVCache: the prompt's entries that its last queries attend to most, and a ring of recent tokens (SnapKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import ConfigError, flag, require_at_least
from kv_cache.base import Device, KVCache, KVShape, NewTensor
from kv_cache.policy import BudgetedPolicy
from kv_cache.streaming import StreamingKVCache

# Entries that an entry's score is shared with: as many before it as behind it, and itself.
POOL = 5


class SnapKVCache(StreamingKVCache):
    """Keeps, of each layer and KV head, the `budget - window` entries of a prompt that were selected, and the
    last `window` tokens (Li et al., "SnapKV", arXiv 2404.14469).

    The queries of the prompt's last `window` tokens vote: an entry's score is the attention that they pay to it,
    averaged over POOL neighbours, so that what surrounds a hit is kept with it. A prompt within the budget is kept
    whole. As the text goes on, the window moves with it and what was selected stays, until the row is filled anew.

    Heads keep different tokens in one slot. `positions` holds 0, 1, ... for what was selected: no token of it
    lies beyond any later query, so who sees it does not depend on which token it is. Keys keep the rotation of
    their absolute position. Errors: ConfigError if the budget leaves nothing to select.
    """

    def __init__(self, config: KVShape, max_batch: int, policy: SnapKV, device: Device, dtype: torch.dtype) -> None:
        budget, window = policy.budget, policy.snapkv_window
        require_at_least("snapkv_window", window, 1)
        if budget < (least := policy.n_first + window + 1):
            what = "the draft's KV budget has no room for chosen entries beside its sinks and its window"
            sizes = "draft_budget", "snapkv_window", "n_sink", "chunk"
            where = ", ".join(flag(name) for name in sizes if hasattr(policy, name))
            seen = f"budget {budget}, {policy.n_first} entries for sinks, window {window}"
            raise ConfigError(what, where, seen, "budget > sinks + window", f"raise the budget to {least} or more")
        super().__init__(config, max_batch, budget, budget - window, device, dtype)
        self.n_observed = window

    def selected(self, kept: torch.Tensor, length: int, keys: NewTensor, queries: NewTensor | None) -> torch.Tensor:
        if length <= self.capacity:
            return kept
        if queries is None:
            what = "SnapKV selects by the attention of the prompt's last queries, and has not got them"
            required = f"the last {self.window} queries of every layer"
            fix = "pass ModelRunner.last_queries(row, prompt, cache.n_observed)"
            raise ConfigError(what, "SnapKVCache.fill_row: queries", None, required, fix)
        newest = torch.arange(length - self.window, length, device=kept.device)
        votes = attention_received(queries(), keys(), newest)[:, : length - self.window]
        pooled = torch.nn.functional.avg_pool1d(votes, POOL, stride=1, padding=POOL // 2)
        chosen = pooled.topk(self.n_sink, dim=1).indices.sort(dim=1).values
        return torch.cat([chosen, newest.expand(len(chosen), -1)], dim=1)


def attention_received(queries: torch.Tensor, keys: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """What each entry gets of the attention of n queries, summed over them and averaged over heads.

    `queries [..., n_head, n, D]` and `keys [..., n_kv_head, C, D]`, rotated; a query sees entries up to its `newest
    [..., n]` -> `[..., n_kv_head, C]` float32; a head's sum is n.
    """
    *batch, n_kv_head, n_token, head_dim = keys.shape
    n_query = queries.shape[-2]
    # The query heads of a group as rows of one product: keys are read once, and not copied for each.
    products = queries.to(keys.dtype).reshape(*batch, n_kv_head, -1, head_dim) @ keys.mT
    scores = (products.float() * head_dim**-0.5).view(*batch, n_kv_head, -1, n_query, n_token)
    is_hidden = torch.arange(n_token, device=keys.device) > newest[..., None]
    scores = scores.masked_fill(is_hidden[..., None, None, :, :], float("-inf"))
    return scores.softmax(dim=-1).sum(dim=-2).mean(dim=-2)


@dataclass(frozen=True)
class SnapKV(BudgetedPolicy):
    """What the prompt's last queries attend to, and recent tokens."""

    name: ClassVar[str] = "snapkv"
    snapkv_window: int = 32
    """recent tokens in the budget, whose queries also choose the others"""

    @property
    def reserved(self) -> int:
        return self.snapkv_window

    room = n_observed = reserved

    @property
    def n_first(self) -> int:
        """Of a text's first entries, how many always stay."""
        return 0

    def for_block(self, n_token: int) -> dict[str, int]:
        least = self.n_first + n_token + 1
        return {"snapkv_window": n_token} | ({"draft_budget": least} if self.budget < least else {})

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return SnapKVCache(config, max_batch, self, device, dtype)
