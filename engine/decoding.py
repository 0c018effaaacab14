"""Decoder: requests come and go while it steps. generate(): submit all prompts, and step until they are done."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch import Batch
from engine.drafters import Drafter, Shown
from engine.modes import Drafts, resolve_mode, verification_in
from engine.pacing import Choice, Fixed, Pacing
from engine.requests import FinishReason, Progress, Request, check_prompt, make_requests
from engine.round import Round, batch_and_parts
from engine.runner import ModelRunner, not_finite
from engine.sampling import Filters, SamplingParams
from engine.stats import Counts, RoundStats, Stats
from engine.timing import synchronize

Phase = Callable[[str], AbstractContextManager[object]]
IDLE = Request(prompt=(), limit=0)


@dataclass(frozen=True)
class GenerateOutput:
    """Of prompt i: `tokens[i]`, the new ones, a stop token included; `finish_reasons[i]`, None where a pacing ended the
    decode before the prompt was done; `errors[i]`, why it ended early, or None.
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    errors: list[str | None]
    stats: Stats

    def require_finite(self, where: str) -> None:
        """Raise UserError naming rows and positions if any row ended because its logits were not finite."""
        if broken := [error for error in self.errors if error]:
            raise not_finite(where, "; ".join(broken[:8]))


class Decoder:
    """Continues requests in the rows of a runner's cache, of which it is the only user meanwhile.

    Rows are independent: each has its own length, accepted count, stop tokens and limit, and the row of a request that
    ended or was cancelled takes the next one that waits. In the greedy and the coupled mode a request's tokens are
    those of plain decoding in that mode; in the rejection mode they have the distribution of plain decoding. Where
    ranks share a model, all submit and cancel alike.

    Args:
        runner: the target and its cache, whose `max_batch` is the number of rows.
        pacing: decides before each round what drafts and how far, or that no round follows. None is plain decoding.
        verification: "greedy", "rejection" (speculative sampling), "coupled" (sampled tokens that depend on seed,
            request id and text alone), or "auto": greedy until a request samples, then rejection.
        phase: a context manager factory around "resume", "draft", "verify" and "accept" of every round, for timing.

    `prefill_seconds`: outside of rounds; `draft_prefill_seconds`: the drafters' part. Errors: ConfigError for the mode.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pacing: Pacing | None = None,
        *,
        drafter: Drafter | None = None,
        verification: str = "auto",
        progress: Progress | None = None,
        phase: Phase | None = None,
    ) -> None:
        self.prefill_seconds = self.draft_prefill_seconds = 0.0
        if pacing is not None and drafter is not None:
            what, fix = "a pacing brings its own drafters", "leave out drafter"
            raise ConfigError(what, "drafter, pacing", "both", "one of them", fix)
        self._runner, self._pacing = runner, pacing or Fixed(drafter)
        self._verification, self._mode = verification, resolve_mode(verification, [])
        self._progress, self._phase = progress or Progress(), phase or (lambda name: nullcontext())
        self._filters, self._waiting = Filters(), deque[Request]()
        # A row without a request idles: it stays parked at its last length, where its writes harm nobody.
        self._rows: list[Request | None] = [None] * runner.max_batch
        # Of each row: its length and its last two tokens.
        self._state = [(0, 0, 0)] * runner.max_batch
        self._made_for: tuple[str, Filters] | None = None
        self._rounds: dict[tuple[Choice, int], Round] = {}
        # The rows that the last round computed, with what each held.
        self._computed: list[tuple[int, Request | None]] = []

    def submit(self, request: Request) -> None:
        """Queue a request; it starts in a step that finds a free row, and `tokens` grows from then on.

        Requests of one id and seed share their random numbers. Errors: ConfigError, and the request is not queued, if
        its prompt is empty or has ids outside the vocabulary, if prompt + limit + gamma + 1 exceeds the model's
        context, the cache or a draft's cache, if the mode cannot verify its sampling, or if it was submitted before.
        """
        if request.tokens or request.finish_reason is not None or request in self._waiting:
            seen = f"{len(request.tokens)} tokens, {request.finish_reason or 'not finished'}"
            fix = "make another Request of the same prompt"
            raise ConfigError("a request is submitted once", f"prompt {request.index}", seen, "a new request", fix)
        gamma = self._pacing.max_gamma
        check_prompt(self._runner, request.index, request.prompt, request.limit, gamma)
        mode = resolve_mode(self._verification, [request.sampling])
        for drafter in self._pacing.drafters:
            drafter.check(self._runner, len(request.prompt) + request.limit + gamma + 1)
        if not request.sampling.greedy:
            self._mode = mode
        self._filters |= Filters.of([request.sampling])
        request.counts = Counts.of_gamma(gamma)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request: if it waits it never starts, if it runs its row is free for the next one, whose prefill
        forgets what the row holds. One that ended stays as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._rows:
            self._rows[self._rows.index(request)] = None

    @torch.inference_mode()
    def step(self) -> RoundStats | None:
        """Admit waiting requests into free rows, then run one round; None if nothing is left to decode, or the pacing
        ends the decode. A request whose logits are not finite ends with the reason in its `error`; the others go on.
        Errors: ConfigError if the pacing chooses a gamma that its drafter has not."""
        started = time.perf_counter()
        while self._waiting and None in self._rows:
            self._admit(self._rows.index(None), self._waiting.popleft())
        choosing = time.perf_counter()
        choice = self._pacing.choose(len(busy)) if (busy := self._busy()) else None
        choice_seconds = time.perf_counter() - choosing
        if choice is not None and choice.drafter is not None:
            # What a drafter does with a prompt is no part of a round, however late it meets it.
            self.draft_prefill_seconds += self._introduce(choice.drafter)
        self.prefill_seconds += time.perf_counter() - started - choice_seconds
        if choice is None:
            return None
        return self._run_round(choice, time.perf_counter() - choice_seconds)  # choosing is part of the round

    def _busy(self) -> list[tuple[int, Request]]:
        return [(row, request) for row, request in enumerate(self._rows) if request]

    def _gather(self) -> Batch:
        """The busy rows, and as many idle ones as make up a number of rows that rounds are made for."""
        needed = self._mode, self._filters
        if self._made_for != needed:  # by the first requests, or by one that samples in a way that none before did
            self._made_for, self._rounds, self._computed = needed, {}, []
            self._whole, self._captured = batch_and_parts(self._runner, self._pacing.drafters, *needed)
        n_busy = len(self._busy())
        idle = [row for row, request in enumerate(self._rows) if request is None]
        filling = idle[: self._runner.n_computed(n_busy) - n_busy]
        computed = [(row, request) for row, request in enumerate(self._rows) if request or row in filling]
        batch = self._whole.first(len(computed))
        if computed != self._computed:
            self._computed = computed
            for row in filling:
                if self._state[row][0] == 0:  # never filled: it idles at position 0, and writes over what it may hold
                    self._runner.cache.notes.pop(row, None)
            requests = [request or IDLE for _, request in computed]
            sampling, ids = [request.sampling for request in requests], [request.id for request in requests]
            batch.set_rows(sampling, ids, [row for row, _ in computed])
            self._set_state(batch)
        return batch

    def _set_state(self, batch: Batch) -> None:
        for row, request in self._busy():
            previous = request.tokens[-2] if len(request.tokens) > 1 else request.prompt[-1]
            self._state[row] = request.length, previous, request.tokens[-1]
        batch.set_state(*zip(*(self._state[row] for row, _ in self._computed), strict=True))

    def _admit(self, row: int, request: Request) -> None:
        """Prefill a prompt into a free row and emit its first token; the row stays free if that ends it."""
        runner = self._runner
        prefilled = runner.prefill_row(row, request.prompt, self._progress.prefilled)
        self._state[row] = len(request.prompt), 0, 0
        if prefilled.bad_position is not None:
            request.fail(prefilled.bad_position)
        else:
            # The first token ends a round without drafts, whose last known token is the prompt's.
            batch = Batch(1, Filters.of([request.sampling]), runner.device)
            batch.set_rows([request.sampling], [request.id])
            batch.set_state([len(request.prompt) - 1], [0], request.prompt[-1:])
            first = verification_in(self._mode, batch, 0, runner.model)

            def next_token() -> Tensor:
                return first.verify(Drafts(batch.current.new_empty(1, 0)), prefilled.logits[None, None]).next_token

            request.emit([int(runner.ranks.decided(next_token, 1))])
            self._progress.emitted(1)
        if request.finish_reason is None:
            self._rows[row] = request
        else:
            self._progress.finished(request)

    def _introduce(self, index: int) -> float:
        """Show a drafter the prompts that it does not know; returns the seconds until every rank is done with them."""
        started = time.perf_counter()
        if n_shown := self._show(index, lambda request: len(request.prompt)):
            self._progress.prefilled(n_shown)
            synchronize(self._runner.device)
            self._runner.ranks.gathered(None)
        return time.perf_counter() - started

    def _show(self, index: int, length_of: Callable[[Request], int]) -> int:
        """Let a drafter follow the rows up to those lengths; returns how many tokens it had not."""
        shown = []
        for row, request in self._busy():
            known, length = request.followed.get(index, 0), length_of(request)
            if known < length:
                shown.append(Shown(row, request.id, [*request.prompt, *request.tokens][:length], known))
                request.followed[index] = length
        self._pacing.drafters[index].follow(shown)
        return sum(len(one.text) - one.known for one in shown)

    def _run_round(self, choice: Choice, started: float) -> RoundStats:
        """One round, which began at that time."""
        batch, busy = self._gather(), self._busy()
        round_ = self._round_of(choice, batch)
        with self._phase("resume"):
            if choice.drafter is not None:
                self._show(choice.drafter, lambda request: request.length)
        with self._phase("draft"):
            if choice.drafter is not None:
                round_.propose()
        with self._phase("verify"):
            round_.verify()
        with self._phase("accept"):
            round_.accept()
            outcomes = dict(zip((row for row, _ in self._computed), round_.outcomes(), strict=True))
        n_emitted = 0
        for row, request in busy:
            if self._rows[row] is not request:  # cancelled meanwhile, by one that was notified of another's end
                continue
            n_emitted += (n_kept := request.commit(outcomes[row]))
            self._progress.decoded(request, outcomes[row], n_kept)
            if choice.drafter is not None:
                request.followed[choice.drafter] = request.length
            if request.finish_reason is not None:
                self._rows[row] = None
                self._progress.finished(request)
        self._set_state(batch)
        round_.roll_back()
        self._pacing.observe(choice, [len(outcomes[row].block) - 1 for row, _ in busy])
        seconds = time.perf_counter() - started
        self._progress.emitted(n_emitted)
        return RoundStats(seconds, len(busy), n_emitted, choice)

    def _round_of(self, choice: Choice, batch: Batch) -> Round:
        """Errors: ConfigError if the drafter has no such gamma."""
        kind = choice, len(batch.rows)
        if kind not in self._rounds:
            drafter = None if choice.drafter is None else self._pacing.drafters[choice.drafter]
            most = 0 if drafter is None else drafter.gamma
            if not 0 <= choice.gamma <= most:
                where = f"generate: pacing ({type(self._pacing).__name__})"
                required, fix = f"a gamma of 0 to {most}", "build the drafter with the largest gamma that is chosen"
                raise ConfigError("a round drafts more than its drafter can", where, choice, required, fix)
            self._rounds[kind] = Round(self._runner, batch, drafter, choice.gamma, self._mode, self._captured)
        return self._rounds[kind]


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Drafter | None = None,
    pacing: Pacing | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verification: str = "auto",
    request_ids: Sequence[int] | None = None,
    numbered_from: int = 0,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    phase: Phase | None = None,
) -> GenerateOutput:
    """Continue every prompt; any number of prompts of any lengths runs through the cache's rows (see `Decoder`).

    Args:
        prompts: token ids; limits, sampling (None: greedy) and stop tokens, which are kept, are one for all of them,
            or one a prompt.
        drafter: proposes `gamma` tokens in every round; None is the autoregressive baseline.
        pacing: in place of one drafter in every round.
        request_ids: what keys each prompt's random numbers beside its seed; its index if None. A prompt
            that keeps id and seed keeps its tokens (coupled mode), wherever it stands in the batch.
        numbered_from: the first prompt's index, which messages name.

    Errors: ConfigError, before anything runs, as `Decoder.submit`, or if two prompts share request id and seed.
    """
    decoder = Decoder(runner, pacing, drafter=drafter, verification=verification, progress=progress, phase=phase)
    requests = make_requests(prompts, max_new_tokens, stop_tokens, sampling, request_ids, numbered_from)
    for request in requests:
        decoder.submit(request)
    rounds = tuple(iter(decoder.step, None))
    counts = tuple(request.counts for request in requests)
    stats = Stats(counts, (rounds,), decoder.prefill_seconds, decoder.draft_prefill_seconds)
    reasons, errors = [one.finish_reason for one in requests], [one.error for one in requests]
    return GenerateOutput([one.tokens for one in requests], reasons, errors, stats)
