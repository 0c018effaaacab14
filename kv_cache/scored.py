"""ScoredPolicy: keeps the prompt's entries that its method `score` ranks highest, and a ring of recent tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import refuse, require_at_least
from kv_cache.base import Device, KVCache, KVShape, PromptEntries
from kv_cache.full import FullKVCache
from kv_cache.policy import TINY, BudgetedPolicy
from kv_cache.ring import RingKVCache


class ScoredKVCache(RingKVCache):
    """Keeps in each layer and KV head the `budget - window` entries of a prompt that the policy scores highest, and the
    last `window` tokens. A prompt within the budget is kept whole. As the text goes on, the window moves with it; the
    selection stays until the row is filled anew.

    Heads keep different tokens in a slot. `positions` holds 0, 1, ... for selected entries: every later query may see
    all of them, so it does not matter which tokens they are. Keys keep the rotation of their absolute position. Errors:
    ConfigError if the budget leaves nothing to select, or is smaller than the policy's number of queries.
    """

    selects = True

    def __init__(
        self, config: KVShape, max_batch: int, policy: ScoredPolicy, device: Device, dtype: torch.dtype
    ) -> None:
        budget, window = policy.budget, policy.snapkv_window
        require_at_least("snapkv_window", window, 1)
        # A selected entry fits next to sinks and window, and the shortest prompt that is selected from has all queries.
        require_at_least("draft_budget", budget, max(policy.n_first + window + 1, policy.n_queries))
        super().__init__(config, max_batch, budget, budget - window, device, dtype)
        self.n_queries, self._score = policy.n_queries, policy.score

    def selected(self, kept: Tensor, prompt: PromptEntries) -> Tensor:
        scores, n_kv_head, n_older = self._score(prompt), self.entries.shape[3], prompt.length - self.window
        if scores.shape not in ((n_kv_head, prompt.length), (n_kv_head, n_older)):
            what, fix = "a policy's scores are not one for each KV head and entry", "score each key of each head"
            required = f"[n_kv_head, length] = {n_kv_head, prompt.length}"
            refuse(self._score.__qualname__, tuple(scores.shape), required, what, fix)
        chosen = scores[:, :n_older].topk(self.n_fixed, dim=1).indices.sort(dim=1).values
        return torch.cat([chosen, kept[self.n_fixed :].expand(len(chosen), -1)], dim=1)


@dataclass(frozen=True)
class ScoredPolicy(BudgetedPolicy):
    """A budgeted policy that ranks a prompt's entries. It defines `score`, and `n_queries` if it needs queries."""

    selects: ClassVar[bool] = True
    snapkv_window: int = 32
    """recent tokens in the budget; in a policy that selects by queries, theirs choose the other entries"""

    @abstractmethod
    def score(self, prompt: PromptEntries) -> Tensor:
        """Return scores `[n_kv_head, length]` of one layer's entries of a prompt; the highest stay. The last
        `snapkv_window` tokens stay whatever they score, and may be left out."""

    def dry_run(self, cache: KVCache, length: int) -> None:
        super().dry_run(cache, length)
        source = FullKVCache(TINY, 1, length)
        source.entries.copy_(torch.arange(source.entries.numel()).view(source.entries.shape) % 97)
        cache.fill_row(0, source, length, queries=[torch.ones(TINY.n_head, self.n_queries, TINY.head_dim)])

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
        """The number of a text's first entries that always stay, a multiple of the chunk."""
        return 0

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return ScoredKVCache(config, max_batch, self, device, dtype)
