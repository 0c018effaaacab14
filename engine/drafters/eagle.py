"""Eagle: drafts with a few layers that continue the target's hidden states, token by token, over another cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.base import RowUpdate
from engine.drafters.config import HeadConfig, ModelDrafterConfig, Parts
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.observed import ObservedStates
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import KVCache, Policy
from models.heads.eagle import EagleHead


class Eagle(ModelDrafter):
    """Drafts a chain of tokens by an EAGLE-1, -2 or -3 head (see `EagleHead`).

    The head's cache has at position p the entry of the target's state at p and the token behind it. A round first runs
    all tokens of the last verification again, accepted or not, so that shapes never change: the target's states replace
    the head's approximations, and entries behind the row's end are overwritten before a query sees them. The target
    stores no states, so the prompt's tokens whose entries the cache keeps run through it again. Errors: ConfigError if
    a round does not fit the cache's window.
    """

    def __init__(self, runner: ModelRunner, head: EagleHead, cache: KVCache, gamma: int) -> None:
        require_by_position(cache, type(cache).__name__)
        super().__init__(runner.over(cache, head.body), gamma, runner.cache)
        head.borrow(runner.model)
        self._target, self._head, self.cache = runner, head, cache
        # A cache that keeps only the end of a prompt needs the whole prompt to choose it.
        self.follows_parts = cache.max_block == cache.max_length
        self._observed = ObservedStates(runner, gamma, head.shape.state_dim, head.shape.inputs_of)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for row, _, text, n_seen, *_ in rows:
            if n_seen == 0:
                self.cache.reset_row(row)
            # From the last round before n_seen on, which may have left the head's approximations.
            self._fill(row, text, first=max(0, n_seen - self.gamma - 1) if n_seen else 0)

    def _fill(self, row: int, text: Sequence[int], first: int) -> None:
        """Run the tokens from `first` on that the cache keeps, but not the last, whose state is observed."""
        last = len(text) - 1
        kept = [p for p in self.cache.retained_positions(last).tolist() if p >= first]
        most = min(self._target.prefill_chunk, self.cache.prefill_block)
        while kept:
            at = range(kept[0], kept[0] + sum(p == kept[0] + i for i, p in enumerate(kept[:most])))
            kept = kept[len(at) :]
            states, _ = self._target.recompute(row, text, at, self._observed.layers)
            following, positions = torch.tensor([[text[p + 1] for p in at], [*at]], device=self.cache.device)[:, None]
            view = self.cache.view(slice(row, row + 1), at.stop, block_at_end=True)
            self._head.advance(self._fused(states), following, positions, view)
        self._observed.begin(row, text)

    def _fused(self, states: Tensor) -> Tensor:
        return self._head.fused(states.to(self._head.body.dtype))

    def verify(self, target: ModelRunner, batch: Batch, block: Tensor, gamma: int, observe: bool) -> Tensor:
        return self._observed.verify(target, batch, block, gamma)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        states, following, positions, last = self._observed.of_rows(batch)
        # The last round may have drafted more than this one.
        view = batch.view_of(self.cache, self.gamma)
        after = self._head.advance(self._fused(states), following, positions, view)
        self._state = after.take_along_dim(last[..., None], dim=1)
        return super().propose(batch, verification, gamma)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        if i > 0 and cache is not None:
            position = batch.lengths[:, None] - 1 + i
            self._state = self._head.advance(self._state, tokens[:, None], position, cache)
        return self._head.logits(self._state[:, 0])


def require_by_position(cache: KVCache | Policy, name: str) -> None:
    """Raise ConfigError if a head's cache would select entries by content rather than by position."""
    if cache.selects:
        where, required = flag("draft_policy"), "a policy that goes by position"
        what, fix = "a head's cache cannot select entries by their content", f"use {where} streaming or full"
        raise ConfigError(what, where, name, required, fix)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig, ModelDrafterConfig):
    """An EAGLE head, which goes on from the target's hidden states."""

    name: ClassVar[str] = "eagle"

    def check(self) -> None:
        super().check()
        require_by_position(self.policy, self.policy.name)

    def build(self, parts: Parts) -> Eagle:
        head = parts.model
        return Eagle(parts.runner, head, parts.new_cache(head.body.config), parts.gamma)
