"""Drafter: the interface between a decoder and the proposals that its target verifies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.hidden_states import HiddenStateBuffer
from engine.drafters.schedules import Schedule
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from engine.stats import Counts
from kv_cache import KVCache, WriteThroughKVCache


class RowUpdate(NamedTuple):
    """The tokens of a row of the target that a drafter has to catch up on.

    tokens: the text whose entries the row holds; read only, since the list grows later. n_seen: how many of these the
    drafter has followed; 0 for the prompt of a new request, `request_id`. noise_key, prediction: see `Request`.
    verified: the positions that rounds of this decode have verified, from the prompt's length on; may reach beyond
    `tokens`. By default, `tokens` is a prompt.
    """

    row: int
    request_id: int
    tokens: Sequence[int]
    n_seen: int
    noise_key: tuple[int, int] | None = None
    prediction: Sequence[int] = ()
    verified: range = range(0)

    @property
    def is_whole_prompt(self) -> bool:
        """True if `tokens` has the whole prompt, and no round has verified a token yet."""
        return not self.verified and len(self.tokens) >= self.verified.start


class Drafter(ABC):
    """Proposes up to `gamma` tokens per row and round.

    Optional: `parts`, the drafters that this one is made of, the main one first; `schedule`, which limits how many
    tokens of a round each row drafts; `hidden_buffer`, the target's states that it drafts from, kept in every round of
    a decode; `follows_parts`, True if `follow` takes a prompt in parts, and begins after the tokens that the draft's
    row holds; `reads_current`, True if `follow` gets the current token, too; `verified_cache`; `is_written_through`,
    True if verifications write its cache's entries; `refresh`, which begins every `refresh_every`-th of the `n_rounds`
    rounds that this drafter drafted for (0: none); `skips_model`, True if the last round's drafts were guesses from
    text and its model did not run (None: no text drafter stands next to a model); and `n_predicted`, by row: how many
    of the first draft tokens were copied from the request's prediction.
    """

    gamma: int
    parts: Sequence["Drafter"] = ()
    schedule: Schedule = Schedule()
    hidden_buffer: HiddenStateBuffer | None = None
    follows_parts: bool = False
    reads_current: bool = False
    is_written_through: bool = False
    refresh_every: int = 0
    n_rounds: int = 0
    skips_model: bool | None = None
    n_predicted: Mapping[int, int] = MappingProxyType({})

    def check(self, target: ModelRunner, length: int) -> None:
        """Raise ConfigError unless this drafter can draft for that target, in rows of up to `length` tokens."""
        for part in self.parts:
            part.check(target, length)

    @abstractmethod
    def follow(self, rows: Sequence[RowUpdate]) -> None:
        """Update state from these rows. Runs eagerly, never inside a CUDA graph."""

    def follow_verified(self, rows: Sequence[RowUpdate]) -> None:
        """Follow tokens of a verification, whose entries a drafter that is written through has already."""
        if self.reads_current or not self.is_written_through:
            self.follow(rows)

    @abstractmethod
    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        """Draft `gamma` tokens to follow each row's current token; `gamma` is at most the drafter's.

        Row b uses the first `lengths[b]` columns. Narrower if the schedule cut all rows (never when captured). A draft
        model's tokens are what `verification.draw` gives for its logits.
        """

    def rollback(self, batch: Batch) -> None:
        """Forget rejected drafts: the round has left `batch.lengths [B]` tokens in `batch.rows` of the target."""
        for part in self.parts:
            part.rollback(batch)
        self.schedule.observe(batch)

    def verified_cache(self, observe: bool) -> WriteThroughKVCache | None:
        """Return the cache that verifications of this drafter's rounds write; None: the target's. observe: True in the
        last round before a `refresh`."""
        return self.parts[0].verified_cache(observe) if self.parts else None

    def refresh(self, batch: Batch, gamma: int) -> None:
        """Choose anew which entries drafts read, by the last verification; may be captured, as `propose`."""
        if self.parts:
            self.parts[0].refresh(batch, gamma)

    def inner_counts(self) -> Counts | None:
        """Return the acceptance counts of a draft that this drafter verifies, since the last call; None without one."""
        return next((counts for part in self.parts if (counts := part.inner_counts()) is not None), None)

    def is_due(self, ahead: int = 0) -> bool:
        """True if the current round, or the round `ahead` rounds later, begins with `refresh`: the drafter's second
        round, since a verification precedes it, and every `refresh_every`-th round after that."""
        return self.refresh_every > 0 and (self.n_rounds + ahead - 2) % self.refresh_every == 0


class WrappingDrafter(Drafter):
    """Drafts as the drafter `inner` does, whose schedule it has: a base for drafters that change some of its hooks."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.parts, self.gamma, self.schedule = inner, (inner,), inner.gamma, inner.schedule
        self.hidden_buffer, self.refresh_every = inner.hidden_buffer, inner.refresh_every
        self.follows_parts, self.reads_current = inner.follows_parts, inner.reads_current
        self.is_written_through, self.skips_model = inner.is_written_through, inner.skips_model

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        self.inner.follow(rows)
        self.skips_model, self.n_predicted = self.inner.skips_model, self.inner.n_predicted

    def follow_verified(self, rows: Sequence[RowUpdate]) -> None:
        if self.reads_current or not self.is_written_through:
            self.follow(rows)
        else:
            self.inner.follow_verified(rows)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        return self.inner.propose(batch, verification, gamma)

    def rollback(self, batch: Batch) -> None:
        self.inner.rollback(batch)


def require_same_cache(drafter: Drafter, cache: KVCache, target: ModelRunner) -> None:
    """Raise ConfigError unless a drafter was built over the cache of the target that it drafts for."""
    if target.cache is not cache:
        where, seen = f"{type(drafter).__name__}: runner", "another target's cache"
        fix = "build the drafter from the runner that is passed to generate()"
        raise ConfigError("the drafter was built on another runner", where, seen, "the runner that generates", fix)


def check_gamma(gamma: int, window: int, field: str = "gamma", budget: str = "draft_budget", block: int = 0) -> None:
    """Raise ConfigError unless a verification block of gamma + 1 tokens fits the draft cache's window, and a block of
    `block` tokens. field, budget: the options that set gamma and the cache's size."""
    if max(gamma + 1, block) > window:
        what = "the draft's cache has no room for a verification block"
        seen, needed = f"gamma {gamma}, room for {max(window, 0)} tokens", f"room for {max(gamma + 1, block)} tokens"
        fix = f"lower {flag(field)}, or use a larger {flag(budget)} or a longer window"
        raise ConfigError(what, f"{flag(field)} and {flag(budget)}", seen, needed, fix)


def check_drafts(drafter: Drafter, drafts: Drafts, current: Tensor, gamma: int, n_ids: int) -> None:
    """Raise ConfigError unless drafts have the shapes, dtypes and device to follow the tokens `current [B]`."""
    if not isinstance(drafts, Drafts):
        raise wrong_drafts(drafter, "propose", type(drafts).__name__, "Drafts")
    given: tuple[Any, ...] = drafts
    n_row, n = len(current), min(gamma, (gamma, *getattr(drafts.tokens, "shape", ()))[-1])
    shapes = (n_row, n), (n_row, n, n_ids), (n_row,)
    for name, x, shape in zip(drafts._fields, given, shapes, strict=True):
        if x is None and name != "tokens":
            continue
        is_alike = isinstance(x, Tensor) and x.shape == shape and x.device == current.device
        if not is_alike or not (x.is_floating_point() if name == "probs" else x.dtype == torch.int64):
            seen = f"{x.dtype} {[*x.shape]} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            kind = "floats" if name == "probs" else "int64"
            raise wrong_drafts(drafter, f"propose: {name}", seen, f"{kind} {[*shape]} on {current.device}")


def wrong_drafts(drafter: Drafter, where: str, seen: object, required: str) -> ConfigError:
    """Return the error for drafts that cannot be verified."""
    what, fix = "a drafter returned what cannot be verified", "correct the drafter (docs/extending.md)"
    return ConfigError(what, f"{type(drafter).__name__}.{where}", seen, required, fix)


def check_most_drafts(gamma: int, most: int) -> None:
    """Raise ConfigError if gamma exceeds the most tokens that a head drafts."""
    if gamma > most:
        what, fix = "the head drafts fewer tokens than gamma", f"use {flag('gamma')} {most} or less"
        raise ConfigError(what, flag("gamma"), f"gamma {gamma}, {most} from the head", f"<= {most}", fix)
