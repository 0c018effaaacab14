"""Round: its parts propose, verify, accept and roll back, each of which can be a captured CUDA graph."""

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from common.errors import refuse
from engine.batch import Batch
from engine.controller import RoundChoice
from engine.drafters import Drafter, check_drafts, wrong_drafts
from engine.drafters.hidden_states import HiddenStateBuffer
from engine.graphs import BatchKey, GraphKey
from engine.modes import GREEDY, Drafts, Verification, resolve_mode, verification_in
from engine.requests import Outcome, Request
from engine.rows import Rows
from engine.runner import ModelRunner, finite_rows
from engine.sampling.distribution import ALL, Filters, SamplingParams
from engine.timing import synchronize

Result = TypeVar("Result")


class Round:
    """A round in which `drafter` proposes at most `gamma` tokens a row; without a drafter, a plain step of the target.

    Its parts run in order, over the batch as it then is; before `roll_back` the decoder sets `batch.lengths` to the
    lengths that the round left. Captured parts outlive this object: a replay reads only tensors of the batch, of the
    drafter and of the results below, which keep their memory.

    proposed: drafts in `n_drafts` columns, `gamma` or fewer by a schedule, and the verification that has drawn them.
    forced: the rows, among those of the batch, in which tokens that a grammar forces took the place of drafts.
    logits: the target's, `[B, n_drafts + 1, V]`, after each row's current token and drafts. verdicts: `[B, 3 +
    n_drafts + n_drafts + 1]` int64: the number of drafts, the number accepted, the next token, the drafts, and whether
    the logits at each position are finite. key: the kind of round, if its parts may be captured. buffers: the states
    that every round of the decode keeps; by default, the drafter's. keeps_probs: True if drafts keep the distributions
    that they are drawn from in every mode.
    """

    proposed: tuple[Drafts, Verification]
    logits: Tensor
    verdicts: Tensor
    forced: Collection[int] = ()

    def __init__(
        self,
        runner: ModelRunner,
        batch: Batch,
        drafter: Drafter | None,
        gamma: int,
        mode: str,
        key: BatchKey | None = None,
        buffers: Sequence[HiddenStateBuffer] | None = None,
        keeps_probs: bool = False,
    ) -> None:
        self._keeps_probs = keeps_probs
        self.runner, self.batch, self.drafter, self.gamma = runner, batch, drafter, gamma
        self._key = None if runner.graphs is None else key
        self._buffers = buffers_of([drafter] if drafter else []) if buffers is None else buffers
        self._new_verification = partial(verification_in, mode, batch, gamma, runner.model)
        self.proposed = Drafts(batch.current.new_empty(len(batch.current), 0)), self._new_verification()

    def run(self, phase: Callable[[str], AbstractContextManager[object]] = nullcontext) -> list[Outcome]:
        """Run all parts but `roll_back`, in phases "draft", "verify" and "accept"; return each row's outcome."""
        with phase("draft"):
            if self.drafter is not None or self.gamma:
                self.propose(phase)
        with phase("verify"):
            self.verify()
        with phase("accept"):
            self.accept()
            return self.outcomes()

    def _part(self, name: str, part: Callable[[], Result], verifies: bool = False) -> Result:
        """Call a part of a round, or capture and replay it (see `engine.graphs`). verifies: the part runs the target,
        so its first replay is compared with a call, and rounds in which the drafter observes are captured apart."""
        if self._key is None or self.runner.graphs is None:
            return part()
        observes, is_masked = verifies and self.observes, self.batch.masks.applies
        key = GraphKey(name, self._key, id(self.drafter), self.gamma, len(self.batch.rows), observes, is_masked)
        return self.runner.graphs(key, part, checked=verifies)

    def propose(self, phase: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Run the drafter, and before it `refresh` if that is due, in a `phase` "refresh". Tokens that grammars force
        take the place of drafts; without a drafter, they are all drafts."""
        if self.drafter is not None:
            self.drafter.n_rounds += 1
            if self.drafter.is_due():
                with phase("refresh"):
                    self._part("refresh", partial(self.drafter.refresh, self.batch, self.gamma))
        self.proposed = self._part("draft", self._draft)[:2]
        self.forced = self.batch.masks.force(*self.proposed[0])

    def _draft(self) -> tuple[Drafts, Verification, object]:
        """Return drafts, the verification that has drawn them, and what `roll_back` reads of the drafter's schedule:
        captured parts keep the memory of their results alone."""
        verification, batch = self._new_verification(), self.batch
        if self.drafter is None:
            none = batch.current.new_zeros(len(batch.rows), self.gamma)
            return Drafts(none, lengths=torch.zeros_like(batch.current)), verification, None
        verification.keeps_probs = self._keeps_probs
        verification.masks_drafts = any(batch.masks.grammars) and self._key is None
        drafts = self.drafter.propose(batch, verification, self.gamma)
        check_drafts(self.drafter, drafts, batch.current, self.gamma, self.runner.vocab_size)
        return drafts, verification, self.drafter.schedule.of_round

    @property
    def _verifiable(self) -> Drafts:
        """The drafts with ids and lengths cut to their ranges, so that no index is out of bounds before `outcomes`
        refuses those that were outside."""
        tokens, probs, lengths = drafts = self.proposed[0]
        if self.drafter is None:
            return drafts
        lengths = lengths if lengths is None else lengths.clamp(0, self.n_drafts)
        return Drafts(tokens.clamp(0, self.runner.vocab_size - 1), probs, lengths)

    @property
    def observes(self) -> bool:
        """True if the drafter observes this verification, since its next round begins with `refresh`."""
        return self.drafter is not None and self.drafter.is_due(ahead=1)

    def verify(self) -> None:
        """Run the target once over each row's current token and its drafts."""
        self.logits = self._part("verify", self._verify, verifies=True)

    def _verify(self) -> Tensor:
        return self.forward(torch.cat([self.batch.current[:, None], self._verifiable.tokens], dim=1))

    def forward(self, block: Tensor) -> Tensor:
        """Store entries of `block [B, T]`, T <= gamma + 1, and return the target's logits `[B, T, V]`."""
        written = None if self.drafter is None else self.drafter.verified_cache(self.observes)
        view = self.batch.view_of(written or self.runner.cache, self.gamma)
        positions = self.batch.positions(block.shape[1])
        if not self._buffers:
            return self.runner.step(block, positions, view)
        layers = sorted({layer for buffer in self._buffers for layer in buffer.layers})
        logits, hidden, inputs = self.runner.step_with_states(block, positions, view, layers)
        for buffer in self._buffers:
            buffer.keep(self.batch, block, hidden, inputs)
        return logits

    def accept(self) -> None:
        """Decide for all ranks how many drafts of each row are accepted, and the token after them."""
        if any(self.batch.masks.grammars):
            self.batch.masks.fill(self._verifiable.tokens.tolist())
        shape = len(self.batch.lengths), 3 + self.n_drafts + self.n_drafts + 1
        self.verdicts = self._part("accept", partial(self.runner.ranks.broadcast, self._decide, *shape), verifies=True)

    def logprobs(self) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities `[B, n_drafts + 1, V]` that the target verified drafts by, and those that each
        draft was drawn from, `[B, n_drafts, V]`, or None. On the leader, until the batch has another state."""
        drafts, verification = self.proposed
        logits = self.batch.processed(self.logits, self._verifiable.tokens)
        return verification.logprobs(logits), None if drafts.probs is None else drafts.probs.log()

    @property
    def n_drafts(self) -> int:
        return self.proposed[0].tokens.shape[1]

    def _decide(self) -> Tensor:
        drafts, verification = self.proposed
        verdict, lengths = verification.verify(self._verifiable, self.logits), drafts.lengths
        drafted = torch.full_like(verdict.num_accepted, self.n_drafts) if lengths is None else lengths
        counts = torch.stack([drafted, verdict.num_accepted, verdict.next_token], dim=1)
        return torch.cat([counts, drafts.tokens, finite_rows(self.logits)], dim=1)

    def roll_back(self) -> None:
        """Forget every rejected draft in the target's cache and in the drafter's: positions >= the new `lengths`."""
        self._part("roll_back", self._forget_rejected)

    def _forget_rejected(self) -> None:
        self.batch.view_of(self.runner.cache).rollback(self.batch.lengths)
        if self.drafter is not None:
            self.drafter.rollback(self.batch)

    def outcomes(self) -> list[Outcome]:
        """Read `verdicts`, the only read from the device in a round without grammars. Errors: RankError if ranks are
        compared and disagree; RuntimeError for a lost rank; ConfigError if the drafter proposed ids outside the
        vocabulary, or lengths outside 0 to `n_drafts`."""
        ranks = self.runner.ranks
        if ranks.timeout is not None:
            synchronize(ranks.device, ranks.timeout)
        packed, batch = self.verdicts.tolist(), self.batch
        ranks.require_same(
            lambda: f"a round from positions {batch.lengths.tolist()}",
            lambda: (batch.rows, batch.lengths, batch.current, self.proposed[0].tokens, self.verdicts),
        )
        n, n_ids = self.n_drafts, self.runner.vocab_size
        if self.drafter is not None and n:
            if outside := [token for row in packed for token in row[3 : 3 + n] if not 0 <= token < n_ids]:
                raise wrong_drafts(self.drafter, "propose: tokens", outside[0], f"0 <= id < {n_ids}")
            if outside := [row[0] for row in packed if not 0 <= row[0] <= n]:
                raise wrong_drafts(self.drafter, "propose: lengths", outside[0], f"0 to {n}")
        return [
            Outcome(rest[:drafted], [*rest[:accepted], next_token], rest[n:])
            for drafted, accepted, next_token, *rest in packed
        ]


class Rounds:
    """Makes a decoder's rounds; it keeps none, since each holds its logits.

    mode: the verification of requests that sample. observes: see `Progress`. Errors: ConfigError if it is unknown.
    """

    def __init__(
        self, runner: ModelRunner, drafters: Sequence[Drafter], verification: str, observes: bool = False
    ) -> None:
        resolve_mode(verification, [])
        self._runner, self._drafters, self._buffers = runner, drafters, buffers_of(drafters)
        self._verification, self.mode, self._filters = verification, GREEDY, Filters()
        self._observes = observes
        self._batches: dict[BatchKey, Batch] = {}
        self._has_run = False  # graphs of other decoders' kinds of rounds stay
        if runner.graphs is not None:
            self._batches = runner.graphs.batches  # outlive this decoder, with the graphs that read them
            runner.graphs.drop_freed()

    def expect(self, sampling: SamplingParams) -> None:
        """Let rounds serve requests that sample so, too. Graphs for fewer filters go: they are never replayed again.
        Errors: ConfigError if the mode cannot verify such requests."""
        before = self.mode, self._filters
        if not sampling.greedy:
            self.mode = resolve_mode(self._verification, [sampling])
        filters = self._filters | Filters.of([sampling])
        if filters.any_top_k or filters.any_top_p:  # none or both, to limit the number of graphs
            filters |= Filters(True, True, True, ALL)
        self._filters = filters._replace(any_edits=False)  # rounds with and without edits are captured apart
        if self._has_run and before != (self.mode, self._filters) and self._has_batch(*before):
            self._runner.drop_graphs()

    def _has_batch(self, mode: str, filters: Filters) -> bool:
        """True if rounds of that kind, with edits or without, may have been captured."""
        return any(self._key(mode, filters._replace(any_edits=edits)) in self._batches for edits in (False, True))

    def drop(self) -> None:
        """Forget batches and graphs; later rounds make their own."""
        self._has_run = False
        self._batches.clear()
        self._runner.drop_graphs()

    def next(self, choice: RoundChoice, rows: Rows) -> Round:
        """Return the next round of the busy rows. Errors: ConfigError if the drafter has no such gamma."""
        drafter = None if choice.drafter is None else self._drafters[choice.drafter]
        most = choice.gamma if drafter is None else drafter.gamma
        most = min([most, *(buffer.most_drafts for buffer in self._buffers)])
        if not 0 <= choice.gamma <= most:
            what, fix = "a round drafts more than its drafters can", "build the drafters with the largest gamma chosen"
            refuse("the controller", choice, f"a gamma of 0 to {most}", what, fix)
        self._has_run = True
        key = self._key(*self._kind([request.sampling for _, request in rows.busy()]))
        batch = rows.gather(self._batch(key))
        captured = None if self._observes else key
        return Round(self._runner, batch, drafter, choice.gamma, key.mode, captured, self._buffers, self._observes)

    def _kind(self, busy: Sequence[SamplingParams]) -> tuple[str, Filters]:
        """Return the mode and the filters of a round of rows that sample as `busy`: when capturing, those of all
        requests so far. A row's result does not depend on them: a greedy row is a distribution with a single token, and
        filters that a row does not have exclude nothing."""
        if self._runner.graphs is None:
            return GREEDY if all(row.greedy for row in busy) else self.mode, Filters.of(busy)
        return self.mode, self._filters._replace(any_edits=any(row.edits for row in busy))

    def _key(self, mode: str, filters: Filters) -> BatchKey:
        if self._runner.graphs is None:
            return BatchKey((), mode, filters, ())
        # Drafters refer to the runner: with strong references, neither would be freed before garbage is collected.
        drafters, model = tuple(map(weakref.ref, self._drafters)), self._runner.model
        return BatchKey(drafters, mode, filters, (model.backend, model.pointwise))

    def _batch(self, key: BatchKey) -> Batch:
        """Return the batch that rounds of a kind read."""
        runner = self._runner
        if key not in self._batches:
            if runner.graphs is None:
                self._batches.clear()  # a change of kinds is rare, and a batch has numbers for each token
            sizes = runner.device, runner.narrows, runner.vocab_size
            self._batches[key] = Batch(runner.max_batch, key.filters, *sizes)
        return self._batches[key]


def buffers_of(drafters: Sequence[Drafter]) -> list[HiddenStateBuffer]:
    """Return the target's states that these drafters draft from."""
    return [drafter.hidden_buffer for drafter in drafters if drafter.hidden_buffer is not None]


def first_token(runner: ModelRunner, mode: str, request: Request, logits: Tensor) -> int:
    """Choose the token that follows a prompt, by the prompt's last `logits [V]`, as a round without drafts does."""
    batch = Batch(1, Filters.of([request.sampling]), runner.device, n_ids=runner.vocab_size)
    batch.set_rows([request.sampling], [request.id])
    batch.set_state([len(request.prompt) - 1], [0], request.prompt[-1:], [request])
    if request.grammar is not None:
        batch.masks.fill([()])
    first = verification_in(mode, batch, 0, runner.model)

    def next_token() -> Tensor:
        return first.verify(Drafts(batch.current.new_empty(1, 0)), logits[None, None]).next_token

    return int(runner.ranks.broadcast(next_token, 1))
