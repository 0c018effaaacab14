"""ScoredKVCache: the prompt's entries that a policy scores highest, and a ring of recent tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from common.errors import ConfigError, flag, require_at_least
from kv_cache.base import Device, KVCache, KVShape, NewTensor
from kv_cache.policy import BudgetedPolicy
from kv_cache.streaming import StreamingKVCache


class ScoredKVCache(StreamingKVCache):
    """Keeps, of each layer and KV head, the `budget - window` entries of a prompt that its policy scores highest, and
    the last `window` tokens. A prompt within the budget is kept whole. As the text goes on, the window moves with it
    and what was selected stays, until the row is filled anew.

    Heads keep different tokens in one slot. `positions` holds 0, 1, ... for what was selected: no token of it
    lies beyond any later query, so who sees it does not depend on which token it is. Keys keep the rotation of
    their absolute position. Errors: ConfigError if the budget leaves nothing to select, or is smaller than the number
    of queries that the policy selects by.
    """

    def __init__(
        self, config: KVShape, max_batch: int, policy: ScoredPolicy, device: Device, dtype: torch.dtype
    ) -> None:
        budget, window = policy.budget, policy.snapkv_window
        require_at_least("snapkv_window", window, 1)
        if budget < (least := policy.n_first + window + 1):
            what = "the draft's KV budget has no room for chosen entries beside its sinks and its window"
            sizes = "draft_budget", "snapkv_window", "n_sink", "chunk"
            where = ", ".join(flag(name) for name in sizes if hasattr(policy, name))
            seen = f"budget {budget}, {policy.n_first} entries for sinks, window {window}"
            raise ConfigError(what, where, seen, "budget > sinks + window", f"raise the budget to {least} or more")
        if policy.n_queries > budget:  # a prompt that is selected from may be one token longer than the budget
            what, where = "the policy selects by more queries than it keeps entries", flag("draft_budget")
            required, fix = f">= {policy.n_queries}", f"use {where} {policy.n_queries} or more"
            raise ConfigError(what, where, budget, required, fix)
        super().__init__(config, max_batch, budget, budget - window, device, dtype)
        self.n_queries, self._score = policy.n_queries, policy.score

    def selected(self, kept: torch.Tensor, length: int, keys: NewTensor, queries: NewTensor) -> torch.Tensor:
        scores, n_kv_head = self._score(keys(), queries()), self.entries.shape[3]
        shape, shapes = tuple(scores.shape), [(n_kv_head, length), (n_kv_head, length - self.window)]
        if shape not in shapes:
            what, required = "a policy's scores are not one for each entry", f"[n_kv_head, length] = {shapes[0]}"
            raise ConfigError(what, self._score.__qualname__, shape, required, "score each key of each head")
        chosen = scores[:, : length - self.window].topk(self.n_sink, dim=1).indices.sort(dim=1).values
        return torch.cat([chosen, kept[self.n_sink :].expand(len(chosen), -1)], dim=1)


@dataclass(frozen=True)
class ScoredPolicy(BudgetedPolicy):
    """A policy that ranks a prompt's entries; `score` is all that such a policy has to define."""

    snapkv_window: int = 32
    """recent tokens in the budget, whose queries choose the others where a policy chooses by queries"""

    @abstractmethod
    def score(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Rank one layer's entries of a prompt, of which the highest stay: `[n_kv_head, length]`. The last
        `snapkv_window` tokens stay whatever they score, and may be left out.

        keys: `[n_kv_head, length, head_dim]`, rotated. queries: of the prompt's last `n_queries` tokens, `[n_head,
        n_queries, head_dim]`, rotated; `[0]` for a policy that needs none.
        """

    @property
    def n_queries(self) -> int:
        """How many of a prompt's last queries `score` needs; 0: none."""
        return 0

    @property
    def reserved(self) -> int:
        return self.snapkv_window

    room = reserved

    @property
    def n_first(self) -> int:
        """How many of a text's first entries always stay."""
        return 0

    def for_block(self, n_token: int) -> dict[str, int]:
        least = self.n_first + n_token + 1
        return {"snapkv_window": n_token} | ({"draft_budget": least} if self.budget < least else {})

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return ScoredKVCache(config, max_batch, self, device, dtype)
