"""Speculated: a self-draft that has a draft, which it verifies as the target verifies its drafts (TriForce)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from common.errors import flag, refuse, require_at_least
from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate, check_gamma
from engine.drafters.config import AUTO, BuildInputs, DrafterConfig, DraftPlan, Maker, Trait, Wrapper, WrapperPlan
from engine.drafters.model_drafter import ModelDrafter, ModelDrafterConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.self_speculation import SelfConfig, SelfSpeculation
from engine.drafters.standalone import StandaloneConfig
from engine.drafters.stored import PlannedTarget
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from engine.stats import Counts
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.streaming import Streaming


class Speculated(Drafter):
    """Lets `inner` draft for `outer`, which verifies its tokens in one forward and so drafts several at a time for the
    target (Sun et al., TriForce, arXiv 2404.11912, section 4.2).

    Tokens that the inner verification accepts or adds have the outer draft's distributions, by which the target then
    accepts them. There are as many inner rounds as give a round's tokens if half of the inner drafts are accepted; a
    row whose inner drafts fail more often drafts fewer. Verified tokens are written through to an inner self-draft; an
    inner model catches up on them, as after any round.

    Errors: ConfigError if gamma + 1 tokens do not fit the inner draft's window.
    """

    def __init__(self, outer: SelfSpeculation, inner: Drafter) -> None:
        self.gamma, self.refresh_every, self.schedule = outer.gamma, outer.refresh_every, outer.schedule
        self._outer, self._inner, self.parts = outer, inner, (outer, inner)
        self._cache: KVCache | None = None
        if isinstance(inner, SelfSpeculation):
            self._cache = inner.cache
            check_gamma(max(outer.gamma, inner.gamma), self._cache.max_block)
            through = outer.write_through
            through.target = WriteThroughKVCache(through.target, self._cache, outer.layers)
        self.is_written_through = not isinstance(inner, ModelDrafter) or self._cache is not None
        # Sums over all rows: rounds, drafted, emitted; then by draft position how often verified, and accepted.
        self._counts = torch.zeros(3 + 2 * inner.gamma, dtype=torch.int64, device=outer.cache.device)

    def check(self, target: ModelRunner, length: int) -> None:
        self._outer.check(target, length)
        self._inner.check(target, length + self._inner.gamma)  # also rows that have all tokens of a round draft on

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for part in self.parts:
            part.follow(rows)

    def follow_verified(self, rows: Sequence[RowUpdate]) -> None:
        for part in self.parts:
            part.follow_verified(rows)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        most, rows = self._inner.gamma, torch.arange(len(batch.rows), device=batch.rows.device)[:, None]
        offset = torch.arange(most + 1, device=rows.device)
        n_tokens, probs = torch.zeros_like(batch.lengths), None
        tokens = n_tokens[:, None].repeat(1, gamma + most + 1)
        previous, current, outer_view = batch.previous, batch.current, batch.view_of(self._outer.cache, gamma)
        outer_view.in_order = False  # positions of a block may repeat
        cache = outer_view
        if self._cache is not None:
            cache = WriteThroughKVCache(outer_view, batch.view_of(self._cache, gamma))
        n_rounds = -(-2 * gamma // (2 + most))
        for i in range(n_rounds):
            ahead = batch.ahead(n_tokens, previous, current, gamma)
            inner = verification.inner(n_tokens, i, most)
            drafts = self._inner.propose(ahead, inner, most)
            block = torch.cat([current[:, None], drafts.tokens], dim=1)
            # Positions beyond the round's tokens are all put after these, where no token that counts sees them. This
            # inner round overwrites the rejected tokens of the last before a query sees them.
            positions = torch.minimum(ahead.lengths[:, None] + offset, batch.lengths[:, None] + gamma)
            logits = self._outer.runner.step(block, positions, cache)
            is_open = (n_tokens < gamma).long()
            # An inner model has not run the last token of a whole inner round: the next round runs it.
            least = most - (not self.is_written_through and i == n_rounds - 1)
            lengths = torch.full_like(n_tokens, most) if drafts.lengths is None else drafts.lengths
            lengths = torch.minimum(lengths.clamp(max=least), (gamma - 1 - n_tokens).clamp(min=0))

            def decide(inner=inner, drafts=drafts, logits=logits, lengths=lengths) -> Tensor:
                return torch.stack([*inner.verify(drafts._replace(lengths=lengths), logits)])

            accepted, following = self._outer.runner.ranks.broadcast(decide, 2, len(rows))
            columns = n_tokens[:, None] + offset
            tokens[rows, columns] = torch.where(offset == accepted[:, None], following[:, None], block.roll(-1, 1))
            if inner.verified is not None:
                probs = inner.verified.new_zeros(*tokens.shape, inner.verified.shape[-1]) if probs is None else probs
                probs[rows, columns] = inner.verified
            self._count(is_open * (1 - batch.idle), lengths, accepted)
            last = block.gather(1, accepted[:, None]).squeeze(1)
            previous = torch.where(is_open > 0, last, previous)
            current = torch.where(is_open > 0, following, current)
            n_tokens = n_tokens + is_open * (accepted + 1)
        lengths = torch.minimum(n_tokens, self.schedule.bounds(batch, gamma))
        return self.schedule.cut(Drafts(tokens[:, :gamma], None if probs is None else probs[:, :gamma], lengths), batch)

    def rollback(self, batch: Batch) -> None:
        for part in self.parts:
            part.rollback(batch)  # the outer draft's schedule is this drafter's

    def _count(self, rounds: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        offset = torch.arange(self._inner.gamma, device=lengths.device)
        accepted_at = offset < accepted[:, None]
        verified_at = (offset <= accepted[:, None]) & (offset < lengths[:, None])
        sums = torch.stack([rounds, lengths, accepted + 1], dim=1)
        self._counts += (rounds[:, None] * torch.cat([sums, verified_at, accepted_at], dim=1)).sum(dim=0)

    def inner_counts(self) -> Counts:
        """Return the acceptance counts of the inner draft since the last call, summed over rows."""
        rounds, drafted, emitted, *at = self._counts.tolist()
        self._counts.zero_()
        most = self._inner.gamma
        return Counts(rounds, drafted, emitted, at[:most], at[most:])


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Wrapper):
    """A self-draft that has a draft."""

    ASKED_BY: ClassVar[str] = "draft_of_draft"

    draft: SelfConfig
    draft_of_draft: str = "ngram"  # or streaming, or the checkpoint of a smaller model
    inner_gamma: int = 2
    inner_budget: int = 64

    @classmethod
    def around(cls, draft: DrafterConfig, given: Mapping[str, Any], made: Maker) -> DrafterConfig:
        if draft.kind != SelfConfig.name:
            return draft
        if isinstance(draft, Wrapper):
            where = f"{flag('draft_of_draft')} and {draft.ASKED_BY}"
            refuse(where, "both", "one of them", "a draft has a draft, or is wrapped otherwise")
        return super().around(draft, given, made)

    def within(self, n_entries: int, gamma: int) -> Self:
        return self

    @property
    def inner(self) -> DrafterConfig:
        """The draft that drafts for that draft, stored as it is."""
        if self.draft_of_draft == "ngram":
            return NGramConfig(gamma=self.inner_gamma)
        policy = Streaming(self.inner_budget)
        inner = replace(self.draft, gamma=self.inner_gamma, gamma_schedule=None, policy=policy)
        if self.draft_of_draft == "streaming":
            return inner
        shared = {option.name: getattr(inner, option.name) for option in fields(ModelDrafterConfig)}
        return StandaloneConfig(**shared, draft_model=self.draft_of_draft)

    @property
    def traits(self) -> Trait:
        return self.inner.traits | Trait.HIERARCHICAL

    @property
    def unused(self) -> tuple[str, ...]:
        return *super().unused, *(["inner_budget"] if self.draft_of_draft == "ngram" else [])

    def wrap(self, inputs: BuildInputs, *drafters: Drafter) -> Speculated:
        outer, inner = drafters
        assert isinstance(outer, SelfSpeculation)
        return Speculated(outer, inner)

    def check(self) -> None:
        super().check()
        inner = self.draft_of_draft
        require_at_least("inner_gamma", self.inner_gamma, 1)
        if self.gamma_schedule == "confidence":
            where, what = flag("draft_of_draft"), "a draft with a draft does not draw token by token"
            option = flag("gamma_schedule")
            refuse(f"{where} and {option}", inner, f"no {option} of tokens", what, f"leave out {option}")
        if inner != "ngram":
            gammas = {"gamma": 0 if self.gamma == AUTO else self.gamma, "inner_gamma": self.inner_gamma}
            longest = max(gammas, key=gammas.__getitem__)
            check_gamma(gammas[longest], Streaming(self.inner_budget).room, longest, "inner_budget")
        if inner == "streaming" and not self.draft.policy.automatic:  # the same model saves nothing if it reads as much
            require_at_least("draft_budget", self.draft.policy.entries(sys.maxsize), self.inner_budget + 1)

    def alternatives(self, prefix_len: int) -> Sequence[Self]:
        found = super().alternatives(prefix_len)
        if self.draft_of_draft != "streaming" or not self.draft.policy.automatic:
            return found
        return [each for each in found if each.draft.policy.entries(sys.maxsize) > self.inner_budget] or found

    def plan(self, target: PlannedTarget) -> HierarchicalPlan:
        self.check()
        outer, inner = self.wrapped.plan(target), self.inner
        for_outer = target.longer(outer.gamma)
        if isinstance(inner, StandaloneConfig):
            if target.load_format != "dummy" and not os.path.exists(inner.draft_model):
                what, required = "there is no such draft of a draft", "ngram, streaming or a converted checkpoint"
                refuse("draft_of_draft", inner.draft_model[:80], required, what, "check the spelling and the folder")
            planned: DraftPlan = inner.plan(for_outer, "draft_of_draft", "draft_of_draft")
        else:
            planned = inner.plan(for_outer)
        facts: dict[str, Any] = {name: getattr(outer, name) for name in ("gamma", "policy", "capacity")}
        facts |= {"source": planned.source, "group": planned.group}
        return HierarchicalPlan(config=self, parts=(outer, planned), **facts)


@dataclass(frozen=True, kw_only=True)
class HierarchicalPlan(WrapperPlan):
    """The plan of a self-draft, and of the draft that drafts for it."""

    def remarks(self, target: PlannedTarget) -> list[str]:
        outer, inner = self.parts
        return [*outer.remarks(target), *inner.remarks(target.longer(outer.gamma))]
