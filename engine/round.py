"""Round: propose, verify, accept, roll back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch import Batch
from engine.drafters import Drafter
from engine.graphs import Captured
from engine.modes import GREEDY, Drafts, Verification, verification_in
from engine.pacing import Choice
from engine.runner import ModelRunner, finite_rows
from engine.sampling import ALL, Filters, SamplingParams
from engine.timing import synchronize


class Outcome(NamedTuple):
    """A row's round: what was drafted; the accepted ones and the target's own token; which logits are finite."""

    drafts: list[int]
    block: list[int]
    finite: list[int]


def captured_part(
    result: str | None, verifies: bool = False
) -> Callable[[Callable[[Round], Any]], Callable[[Round], None]]:
    """A method that is called, or captured and replayed (see `engine.graphs`); it returns the buffer of that name.
    verifies: where the forward is observed it is captured apart; what a graph of it gives is compared once."""

    def decorate(method: Callable[[Round], Any]) -> Callable[[Round], None]:
        @wraps(method)
        def run(self: Round) -> None:
            kind = id(self.drafter), self.gamma, len(self.batch.rows), verifies and self.observes
            outputs = (
                self._captured(method.__name__, kind, partial(method, self), verifies)
                if self._captured
                else method(self)
            )
            if result is not None:
                setattr(self, result, outputs)

        return run

    return decorate


class Round:
    """A round in which `drafter` proposes at most `gamma` tokens a row; without one, a plain step of the target.

    The four parts run in order, as often as there are rounds, over the batch as it then is: `roll_back` after the
    decoder has set `batch.lengths` to what the round left of each row. Each fills a buffer, which keeps its place where
    parts are captured. Captured parts outlive this object: they may read nothing else of its own.

    proposed: drafts in `n_drafts` columns, `gamma` or fewer by a schedule, and what verifies them, which has drawn
    them. logits: the target's, `[B, n_drafts + 1, V]`, behind each row's current token and drafts. decided: `[B, 3 +
    n_drafts + n_drafts + 1]` int64: numbers of drafts and of accepted ones, the next token, the drafts, and whether
    logits at each position are finite.
    """

    proposed: tuple[Drafts, Verification]
    logits: Tensor
    decided: Tensor

    def __init__(
        self,
        runner: ModelRunner,
        batch: Batch,
        drafter: Drafter | None,
        gamma: int,
        mode: str,
        captured: Captured | None = None,
    ) -> None:
        self.runner, self.batch, self.drafter, self.gamma, self._captured = runner, batch, drafter, gamma, captured
        self._new_verification = partial(verification_in, mode, batch, gamma, runner.model)
        self.proposed = Drafts(batch.current.new_empty(len(batch.current), 0)), self._new_verification()

    def propose(self, phase: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """The drafter's tokens, now and then by what it has chosen anew, in a `phase` "refresh"; nothing to call
        without a drafter."""
        assert self.drafter is not None
        self.drafter.n_rounds += 1
        if self.drafter.is_due():
            with phase("refresh"):
                self.refresh()
        self.draft()

    @captured_part(None)
    def refresh(self) -> None:
        assert self.drafter is not None
        self.drafter.refresh(self.batch, self.gamma)

    @captured_part("proposed")
    def draft(self) -> tuple[Drafts, Verification]:
        assert self.drafter is not None
        verification = self._new_verification()
        return self.drafter.propose(self.batch, verification, self.gamma), verification

    @property
    def observes(self) -> bool:
        """True if the drafter observes this verification, to begin its next round with `refresh`."""
        return self.drafter is not None and self.drafter.is_due(ahead=1)

    @captured_part("logits", verifies=True)
    def verify(self) -> Tensor:
        """One forward of the target over each row's current token and its drafts."""
        return self.forward(torch.cat([self.batch.current[:, None], self.proposed[0].tokens], dim=1))

    def forward(self, block: Tensor) -> Tensor:
        """The target's logits `[B, T, V]` of `block [B, T]`, T <= gamma + 1; stores their KV, a self-draft's too."""
        if self.drafter is None:
            return self.runner.verify(self.batch, block, self.gamma)
        return self.drafter.verify(self.runner, self.batch, block, self.gamma, self.observes)

    @captured_part("decided", verifies=True)
    def accept(self) -> Tensor:
        """How many drafts of each row stand, and the token behind them, on every rank."""
        return self.runner.ranks.decided(self._decide, len(self.batch.lengths), 3 + self.n_drafts + self.n_drafts + 1)

    @property
    def n_drafts(self) -> int:
        return self.proposed[0].tokens.shape[1]

    def _decide(self) -> Tensor:
        drafts, verification = self.proposed
        verdict, lengths = verification.verify(drafts, self.logits), drafts.lengths
        drafted = torch.full_like(verdict.num_accepted, self.n_drafts) if lengths is None else lengths
        counts = torch.stack([drafted, verdict.num_accepted, verdict.next_token], dim=1)
        return torch.cat([counts, drafts.tokens, finite_rows(self.logits)], dim=1)

    @captured_part(None)
    def roll_back(self) -> None:
        """Forget every rejected draft in the target's cache and in the drafter's: positions >= the new `lengths`."""
        self.batch.view_of(self.runner.cache).rollback(self.batch.lengths)
        if self.drafter is not None:
            self.drafter.rollback(self.batch)

    def outcomes(self) -> list[Outcome]:
        """What `accept` decided, row by row: a round's one read from the device. Errors: RankError if ranks are
        compared and disagree; RuntimeError for a lost rank."""
        ranks = self.runner.ranks
        if ranks.timeout is not None:
            synchronize(ranks.device, ranks.timeout)
        packed, batch = self.decided.tolist(), self.batch
        ranks.require_same(
            lambda: f"a round from positions {batch.lengths.tolist()}",
            lambda: (batch.rows, batch.lengths, batch.current, self.proposed[0].tokens, self.decided),
        )
        return [
            Outcome(rest[:drafted], [*rest[:accepted], next_token], rest[self.n_drafts :])
            for drafted, accepted, next_token, *rest in packed
        ]


class Rounds:
    """Makes a decoder's rounds, none of which it keeps: each holds its logits."""

    def __init__(self, runner: ModelRunner, drafters: Sequence[Drafter]) -> None:
        self._runner, self._drafters = runner, drafters
        self._kind: tuple[str, Filters] | None = None

    def batch_of_kind(self, busy: Sequence[SamplingParams], mode: str, filters: Filters) -> tuple[str, Batch]:
        """Return the mode of a round of those rows, and a batch of all rows with their filters.

        Where rounds are captured, there are few kinds of them: the mode is that of all requests so far, and filters are
        none or all. No token changes, since a greedy row is a distribution with one token, and filters that a row does
        not have exclude nothing."""
        if self._runner.graphs is None:
            mode, filters = GREEDY if all(row.greedy for row in busy) else mode, Filters.of(busy)
        elif filters.any_top_k or filters.any_top_p:
            filters = Filters(True, True, True, ALL)
        if self._kind != (mode, filters):
            if self._kind is not None:
                self._runner.drop_graphs()  # those of fewer filters, which never come again
            self._kind = mode, filters
            self._batch, self._captured = self._batch_and_parts(mode, filters)
        return mode, self._batch

    def _batch_and_parts(self, mode: str, filters: Filters) -> tuple[Batch, Captured | None]:
        """The batch that rounds read, and captured parts: the runner keeps these, with all that they hold, for the
        next decode of the same kind, until one of their drafters is gone, when all are dropped (see `CudaGraphs`)."""
        runner = self._runner
        batch = partial(Batch, runner.max_batch, filters, runner.device, runner.narrows)
        if runner.graphs is None:
            return batch(), None
        if any(drafter() is None for held, *_ in runner.captured for drafter in held):
            runner.drop_graphs()
        # What is captured calls these very objects; others in their place have to be captured anew. Drafters refer to
        # the runner: were they held here, neither would go before garbage is collected.
        held = tuple(map(weakref.ref, self._drafters))
        key = (held, mode, filters, runner.model.backend, runner.model.pointwise)
        if key not in runner.captured:
            ranks = runner.ranks  # all that is kept of the runner, which keeps this
            runner.captured[key] = batch(), Captured(runner.graphs, lambda agrees: all(ranks.gathered(agrees)))
        return runner.captured[key]

    def make_round(self, choice: Choice, batch: Batch, mode: str) -> Round:
        """Over that batch, or the first rows of one, for that mode. Errors: ConfigError if the drafter has no such
        gamma."""
        drafter = None if choice.drafter is None else self._drafters[choice.drafter]
        most = 0 if drafter is None else drafter.gamma
        if not 0 <= choice.gamma <= most:
            required, fix = f"a gamma of 0 to {most}", "build the drafter with the largest gamma that is chosen"
            raise ConfigError("a round drafts more than its drafter can", "the pacing", choice, required, fix)
        return Round(self._runner, batch, drafter, choice.gamma, mode, self._captured)


def first_token(
    runner: ModelRunner, mode: str, sampling: SamplingParams, request: int, prompt: Sequence[int], logits: Tensor
) -> int:
    """The token that follows a prompt, by its last `logits [V]`: that of a round without drafts whose last known token
    is the prompt's."""
    batch = Batch(1, Filters.of([sampling]), runner.device)
    batch.set_rows([sampling], [request])
    batch.set_state([len(prompt) - 1], [0], prompt[-1:])
    first = verification_in(mode, batch, 0, runner.model)

    def next_token() -> Tensor:
        return first.verify(Drafts(batch.current.new_empty(1, 0)), logits[None, None]).next_token

    return int(runner.ranks.decided(next_token, 1))
