"""ScoredPolicy: keeps the prompt's entries that its method `score` ranks highest, and a ring of recent tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import refuse, require_at_least
from common.plug_ins import name_of
from kv_cache.base import Device, KVCache, KVShape, PromptEntries
from kv_cache.policy import BudgetedPolicy, described
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
        require_at_least("draft_budget", budget, max(window + 1, policy.reserved + 1, policy.n_queries))
        super().__init__(config, max_batch, budget, budget - window, device, dtype)
        self.n_queries, self._policy = policy.n_queries, policy

    def selected(self, kept: Tensor, prompt: PromptEntries) -> Tensor:
        scores = self._policy.older_scores(prompt)
        chosen = scores.topk(self.n_fixed, dim=1).indices.sort(dim=1).values
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

    def older_scores(self, prompt: PromptEntries, allows_nan: bool = True) -> Tensor:
        """Return the scores of the entries before the window. Errors: ConfigError if `score` returns anything else."""
        scores, n_older = self.score(prompt), prompt.length - self.snapkv_window
        shapes = [[prompt.cache.entries.shape[3], n] for n in (prompt.length, n_older)]
        fits = isinstance(scores, Tensor) and [*scores.shape] in shapes and scores.dtype != torch.bool
        has_nan = fits and not allows_nan and bool(scores[:, :n_older].isnan().any())
        if not fits or has_nan:
            seen = described(scores) + " with NaN" * has_nan
            required = f"a tensor of numbers, such as float32, [n_kv_head, length] = {shapes[0]}"
            what = "a policy's scores are not a number for each KV head and entry"
            refuse(name_of(self.score), seen, required, what, "return a number for each; -inf ranks last")
        return scores[:, :n_older]

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

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return ScoredKVCache(config, max_batch, self, device, dtype)
