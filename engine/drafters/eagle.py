"""Eagle: a layer or few that go on from the target's hidden states, token by token, over a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.base import ModelDrafter, RowUpdate
from engine.drafters.config import HeadConfig, ModelDrafterConfig, Parts
from engine.drafters.observed import ObservedStates
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import KVCache, Policy
from models.heads.eagle import EagleHead


class Eagle(ModelDrafter):
    """EAGLE-1, -2 and -3 (see `EagleHead`) as chains.

    Its cache keeps at position p what the state of p and the token behind it left. A round begins by running the last
    verification's tokens once more, with the target's own states in place of the head's approximations: all of them,
    whatever was accepted, so that shapes never change; what lies behind the row's end is written over before it is
    seen. Of a prompt, only the tokens that the cache keeps run through the target again, which stores no states.
    Errors: ConfigError if a round does not fit the cache's window.
    """

    def __init__(self, runner: ModelRunner, head: EagleHead, cache: KVCache, gamma: int) -> None:
        require_by_position(cache, type(cache).__name__)
        super().__init__(runner.over(cache, head.body), gamma, runner.cache)
        head.borrow(runner.model)
        self._target, self._head, self.cache = runner, head, cache
        # Another cache keeps the end of a prompt, and would be shown all of it.
        self.follows_parts = cache.max_block == cache.max_length
        self.observer = self._observed = ObservedStates(runner, gamma, head.shape.state_dim, head.shape.inputs_of)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for row, _, text, known, *_ in rows:
            if known == 0:
                self.cache.reset_row(row)
            # The last known round's tokens once more: what it has left may be the head's own approximations.
            self._fill(row, text, first=max(0, known - self.gamma - 1) if known else 0)

    def _fill(self, row: int, text: Sequence[int], first: int) -> None:
        """Run what the cache keeps of a row's text from `first` on, all but the last token, whose state is kept."""
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

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.fused(states.to(self._head.body.dtype))

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        states, following, positions, last = self._observed.of(batch)
        # The last round may have drafted more than this one.
        own = batch.view_of(self.cache, self.gamma)
        after = self._head.advance(self._fused(states), following, positions, own)
        self._state = after.take_along_dim(last[..., None], dim=1)
        return super().propose(batch, verification, gamma)

    def logits(self, batch: Batch, i: int, tokens: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        if i > 0 and cache is not None:
            position = batch.lengths[:, None] - 1 + i
            self._state = self._head.advance(self._state, tokens[:, None], position, cache)
        return self._head.logits(self._state[:, 0])


def require_by_position(cache: KVCache | Policy, name: str) -> None:
    """Raise ConfigError if it selects entries: a head's cache keeps of a prompt what its position says."""
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
