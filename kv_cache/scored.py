"""ScoredPolicy: keeps the prompt's entries that one method, `score`, ranks highest, and a ring of recent tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError, require_at_least
from kv_cache.base import Device, KVCache, KVShape, NewTensor
from kv_cache.policy import BudgetedPolicy
from kv_cache.streaming import StreamingKVCache


class ScoredKVCache(StreamingKVCache):
    """Keeps, of each layer and KV head, the `budget - window` entries of a prompt that its policy scores highest, and
    the last `window` tokens. A prompt within the budget is kept whole. As the text goes on, the window moves with it
    and the selection stays, until the row is filled anew.

    Heads keep different tokens in one slot. `positions` holds 0, 1, ... for selected entries: none of them lies beyond
    any later query, so a query sees them whichever token they are. Keys keep the rotation of their absolute position.
    Errors: ConfigError if the budget leaves nothing to select, or is smaller than the number of queries that the policy
    selects by.
    """

    def __init__(
        self, config: KVShape, max_batch: int, policy: ScoredPolicy, device: Device, dtype: torch.dtype
    ) -> None:
        budget, window = policy.budget, policy.snapkv_window
        require_at_least("snapkv_window", window, 1)
        # Room for a selected entry beside sinks and window; and a prompt that is selected from may be only one token
        # longer than the budget.
        require_at_least("draft_budget", budget, max(policy.n_first + window + 1, policy.n_queries))
        super().__init__(config, max_batch, budget, budget - window, device, dtype)
        self.n_queries, self._score = policy.n_queries, policy.score

    def selected(self, kept: Tensor, length: int, keys: NewTensor, queries: NewTensor) -> Tensor:
        scores, n_kv_head = self._score(keys(), queries()), self.entries.shape[3]
        shape, shapes = tuple(scores.shape), [(n_kv_head, length), (n_kv_head, length - self.window)]
        if shape not in shapes:
            what, required = "a policy's scores are not one for each entry", f"[n_kv_head, length] = {shapes[0]}"
            raise ConfigError(what, self._score.__qualname__, shape, required, "score each key of each head")
        n_selected = self.n_sink  # the streaming cache's sinks are the selected entries
        chosen = scores[:, : length - self.window].topk(n_selected, dim=1).indices.sort(dim=1).values
        return torch.cat([chosen, kept[n_selected:].expand(len(chosen), -1)], dim=1)


@dataclass(frozen=True)
class ScoredPolicy(BudgetedPolicy):
    """A budgeted policy that ranks a prompt's entries. It defines `score`, and `n_queries` if it needs queries."""

    snapkv_window: int = 32
    """recent tokens in the budget, whose queries choose the others where a policy chooses by queries"""

    @abstractmethod
    def score(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Return `[n_kv_head, length]` scores of one layer's entries of a prompt; the highest stay. The last
        `snapkv_window` tokens stay whatever they score, and may be left out.

        keys: `[n_kv_head, length, head_dim]`, rotated. queries: of the prompt's last `n_queries` tokens, `[n_head,
        n_queries, head_dim]`, rotated; `[0]` for a policy that needs none.
        """

    @property
    def n_queries(self) -> int:
        """The number of a prompt's last queries that `score` needs."""
        return 0

    @property
    def reserved(self) -> int:
        return self.snapkv_window

    @property
    def room(self) -> int:
        return self.snapkv_window

    @property
    def n_first(self) -> int:
        """The number of a text's first entries that always stay, in whole chunks."""
        return 0

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return ScoredKVCache(config, max_batch, self, device, dtype)
