"""The drafter protocol, and the checks that drafters share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.errors import ConfigError, flag, require_at_least
from engine.batch import Batch
from engine.counts import Counts
from engine.drafters.observed import ObservedStates
from engine.drafters.schedules import Schedule
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import KVCache, WriteThroughKVCache


class RowUpdate(NamedTuple):
    """What a drafter has to catch up on in one row of the target.

    tokens: the text whose entries the row holds; a list that grows later, to be read only. n_seen: how many of them the
    drafter has followed; 0 for the prompt of a new request, `request_id`. draws: see `Request.draws`.
    """

    row: int
    request_id: int
    tokens: Sequence[int]
    n_seen: int
    draws: tuple[int, int] | None = None


class Drafter(Protocol):
    """What a decoder asks of a drafter.

    gamma: the most tokens proposed per row and round; negative, it is a ConfigError of every drafter.
    over: the target's cache that it was built on, if on any.
    verification_cache: that which the target verifies through; None for its own.
    follows_parts: whether it can be shown a prompt in parts, and begin behind what its row already holds.
    schedule: how many of a round's tokens each row drafts.
    observer: what every verification shows the target's hidden states, of what drafts from these.
    refresh_every: rounds after which `is_due` comes again; 0: never.
    runs_missed: whether it has to go through what it missed, where another drafter's cache was written through.
    reads_current: whether it is shown every row before every round, and behind what the target's row holds the current
    token, too.
    parts: drafters that it is made of, which are told what it is; the first alone may choose anew what it reads.
    """

    gamma: int
    over: KVCache | None = None
    schedule: Schedule = Schedule()
    verification_cache: KVCache | WriteThroughKVCache | None = None
    follows_parts: bool = False
    observer: ObservedStates | None = None
    refresh_every: int = 0
    runs_missed: bool = True
    reads_current: bool = False
    parts: tuple[Drafter, ...] = ()

    def check(self, target: ModelRunner, length: int) -> None:
        """Raise ConfigError unless this drafter drafts for that target, in rows of up to `length` tokens."""
        if self.over is not None and target.cache is not self.over:
            what, seen = "the drafter was built on another runner", f"{type(self).__name__} over another target's cache"
            fix = "build the drafter from the runner that is passed to generate()"
            raise ConfigError(what, "generate: drafter", seen, "the cache of the runner that generates", fix)
        for part in self.parts:
            part.check(target, length)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        """Come to know what those rows hold; outside of what is captured."""
        for part in self.parts:
            part.follow(rows)

    def keep_no_prompts(self) -> None:
        """From now on, of those that were rehearsed; what was kept goes."""
        for part in self.parts:
            part.keep_no_prompts()

    def is_due(self) -> bool:
        """Asked before every round: whether it begins with `refresh`."""
        return any(part.is_due() for part in self.parts[:1])

    def refresh(self, batch: Batch, gamma: int) -> None:
        """Choose anew what a round of so many drafts reads, by what was verified; as `propose`."""
        for part in self.parts[:1]:
            part.refresh(batch, gamma)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        """Drafts to follow the batch's current tokens: `gamma` columns, at most the drafter's own gamma, of which a row
        means as many as its draft length says; fewer columns where no row means more by its schedule, and no round is
        captured. A draft model's are what `verification.draw` gives for its logits."""

    def inner_counts(self) -> Counts | None:
        """Of the drafts for what drafts, where there are any, since this was asked last; all rows as one."""
        return None

    def rollback(self, batch: Batch) -> None:
        """Forget what was rejected: the round left `batch.lengths [B]` tokens committed to `batch.rows` of the target's
        cache."""
        for part in self.parts:
            part.rollback(batch)
        self.schedule.observe(batch)


class TextDrafter(Drafter):
    """What drafters without a model share: no cache of their own, so nothing to write through or roll back. Text behind
    the rows' lengths is written over before it is looked at."""

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        require_at_least("gamma", gamma, 0)
        self.gamma, self.over, self._ranks = gamma, runner.cache, runner.ranks

    @abstractmethod
    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        """Tokens `[B, gamma]`, and how many of each row's are meant `[B]`; both int64. Only one rank is asked."""

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        def decide() -> Tensor:
            tokens, n_tokens = self.guess(batch, gamma)
            return torch.cat([torch.minimum(n_tokens, self.schedule.bounds(batch, gamma))[:, None], tokens], dim=1)

        decided = self._ranks.decided(decide, len(batch.current), 1 + gamma)
        return self.schedule.cut(Drafts(decided[:, 1:], lengths=decided[:, 0]), batch)


class Guess(NamedTuple):
    """Tokens that may follow a text, and how many of its last tokens they were found by."""

    tokens: Sequence[int] = ()
    n_matched: int = 0


class HostDrafter(TextDrafter):
    """What text drafters share that look things up on the host of the rank that decides: in `follow`, since nothing
    that `propose` does may be read there."""

    reads_current = True

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        super().__init__(runner, gamma)
        self._guesses = torch.zeros(runner.max_batch, 1 + gamma, dtype=torch.int64, device=runner.device)

    @abstractmethod
    def continued(self, update: RowUpdate) -> Guess:
        """Learn what is new of a row's text, and guess at most gamma tokens behind it."""

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        if rows and self._ranks.leads:
            found = [self.continued(one).tokens for one in rows]
            packed = [[len(tokens), *tokens, *[0] * (self.gamma - len(tokens))] for tokens in found]
            self._guesses[[one.row for one in rows]] = torch.tensor(packed, device=self._guesses.device)

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        own = self._guesses[batch.rows]
        return own[:, 1 : 1 + gamma], own[:, 0].clamp(max=gamma)


class ModelDrafter(Drafter):
    """What drafters that run a model share, over a cache of its own, if any; `runner` may stand for what other ranks
    hold. over: the target's cache, of a model that goes on from what the target holds."""

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int, over: KVCache | None = None) -> None:
        self.gamma, self.over, self._runner = gamma, over, runner
        self._cache = None if runner.cache is over else runner.cache
        require_at_least("gamma", gamma, 0)
        if self._cache is not None:
            check_gamma(gamma, self._cache.max_block)

    @abstractmethod
    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """The logits `[B, V]` of the i-th draft, which follows `tokens [B]`; of a sharded model on the rank that
        decides. cache: what of the draft's own a round can touch."""

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        cache = None if self._cache is None else batch.view_of(self._cache, gamma)
        tokens, distributions, bounds = [batch.current], [], self.schedule.bounds(batch, gamma)
        for i in range(gamma):
            logits = self.logits(batch, i, tokens[-1], cache)

            def draw(logits: Tensor = logits, i: int = i, bounds: Tensor = bounds) -> Tensor:
                token, distribution = verification.draw(logits, i)
                if distribution is not None:
                    distributions.append(distribution)
                return torch.stack([token, self.schedule.shorten(bounds, i, logits, token, batch)])

            token, bounds = self._runner.ranks.decided(draw, 2, len(batch.current))
            tokens.append(token)
            if self.schedule.n_columns(bounds, batch, gamma) <= i + 1:
                break
        drafted, probs = torch.stack(tokens, dim=1)[:, 1:], torch.stack(distributions, dim=1) if distributions else None
        return self.schedule.cut(Drafts(drafted, probs, bounds if self.schedule.varies else None), batch)

    def check(self, target: ModelRunner, length: int) -> None:
        """Also: the draft has a row for each of the target's."""
        super().check(target, length)
        own, name = self._runner, type(self).__name__
        room = None if self._cache is None else self._cache.max_length
        if own.max_batch != target.max_batch:
            what = "the draft cache has another number of rows than the target's"
            fix = "build both caches with the same max_batch"
            raise ConfigError(what, f"{name}: cache.max_batch", own.max_batch, target.max_batch, fix)
        if room is not None and length > room:
            what, fix = "prompt + new tokens + gamma + 1 exceeds the draft's KV cache", "give the draft a longer cache"
            raise ConfigError(what, f"{name}: cache", f"{length} tokens", f"<= {room}", f"{fix}, or a StreamingKVCache")

    def rollback(self, batch: Batch) -> None:
        if self._cache is not None:
            batch.view_of(self._cache).rollback(batch.lengths)
        super().rollback(batch)


def check_gamma(gamma: int, window: int, least: Mapping[str, int] | None = None, field: str = "gamma") -> None:
    """Raise ConfigError unless a verification block of gamma + 1 tokens fits the draft cache's window; `least`: the
    values of options with which it does; `field`: what gamma comes from."""
    if gamma + 1 > window:
        what, names = "the draft's cache has no room for a verification block", [*map(flag, least or ())]
        where = " and ".join([f"gamma ({flag(field)})", *(names or ["the draft's cache"])])
        raised = " and ".join(f"{name} {n} or more" for name, n in zip(names, (least or {}).values(), strict=True))
        fix = f"use {raised or 'a cache with a longer window'}" + f", or a lower {flag(field)}" * (window > 1)
        raise ConfigError(what, where, f"gamma {gamma}, room for {max(window, 0)} tokens", "gamma + 1 tokens", fix)
