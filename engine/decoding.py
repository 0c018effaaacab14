"""Decoder: requests come and go while it steps. generate(): submit all prompts, and step until they are done."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from common.errors import ConfigError
from engine.drafters import Drafter, HostDrafter, RowUpdate
from engine.drafters.model_drafter import ModelDrafter
from engine.modes import GREEDY, resolve_mode
from engine.pacing import PLAIN, Choice, Fixed, Pacing
from engine.requests import FinishReason, Progress, Request, check_prompt, make_requests
from engine.round import Rounds, first_token
from engine.rows import Rows
from engine.runner import Chunks, ModelRunner, not_finite
from engine.sampling import Filters, SamplingParams, logprobs_of
from engine.stats import Counts, RoundStats, Stats
from engine.timing import synchronize
from kv_cache import KVCache
from kv_cache.base import Prefilled

Phase = Callable[[str], AbstractContextManager[object]]
Reuse = Literal["prefixes", "prompts", "nothing"]


@dataclass(frozen=True)
class GenerateOutput:
    """The result of prompt i: `tokens[i]`, its new tokens, a stop token included; `finish_reasons[i]`, None if a pacing
    ended the decode before; `errors[i]`, why it ended early, or None."""

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
    those of plain decoding in that mode; in the rejection mode they have the distribution of plain decoding. Ranks that
    share a model submit and cancel alike.

    Args:
        runner: the target and its cache, whose `max_batch` is the number of rows.
        pacing: chooses before each round a drafter and gamma, or ends the decode. `drafter`: the only one, always to
            gamma. With neither it is plain decoding.
        verification: "greedy", "rejection" (speculative sampling), "coupled" (sampled tokens that depend on seed,
            request id and text alone), or "auto": greedy until a request samples, then rejection.
        phase: a context manager factory around "resume", "draft", "verify" and "accept" of every round, for timing.
        prefill_tokens: the most tokens of a prompt that run between two rounds; None: all prompts that find a row.
        reuses: which text of an earlier request in its row a prompt begins behind: "prefixes", all that both begin
            with; "prompts", a whole prompt; "nothing", so that the work for a prompt does not depend on earlier ones
            (but `NGramCache` drafts by all texts).

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
        prefill_tokens: int | None = None,
        reuses: Reuse = "prompts",
    ) -> None:
        assert pacing is None or drafter is None, "a pacing brings its drafters"
        self.prefill_seconds = self.draft_prefill_seconds = 0.0
        self._runner, self._pacing = runner, pacing or Fixed(drafter)
        resolve_mode(verification, [])
        self._verification, self._mode = verification, GREEDY
        self._progress, self._phase = progress or Progress(), phase or (lambda name: nullcontext())
        self._prefill_tokens, self._reuses = prefill_tokens, reuses
        self._mark = object()  # Request.taken_by: a reference to the decoder would keep its graphs in memory
        self._filters, self._waiting, self._rows = Filters(), deque[Request](), Rows(runner)
        # The request whose prompt is being prefilled, and its row.
        self._starting: tuple[int, Request, Chunks[Prefilled]] | None = None
        self._rounds, self._last_choice = Rounds(runner, self._pacing.drafters), PLAIN

    @property
    def idle(self) -> bool:
        """True if no request waits, is prefilled or decodes."""
        return not (self._waiting or self._starting or self._rows.busy())

    def submit(self, request: Request) -> None:
        """Queue a request; it starts in a step that finds a free row, and `tokens` grows from then on.

        Requests of one id and seed share their random numbers. Errors: ConfigError, and the request is not queued, if
        its prompt is empty or has ids outside the vocabulary, if prompt + limit + gamma + 1 exceeds the model's
        context, the cache or a draft's cache, if the mode cannot verify its sampling, or if any decoder has taken it.
        """
        if request.tokens or request.finish_reason is not None or request.taken_by is not None:
            seen = f"submitted already: {len(request.tokens)} tokens, {request.finish_reason or 'not finished'}"
            fix = "make another Request of the same prompt"
            raise ConfigError("a request is submitted once", f"prompt {request.index}", seen, "a new request", fix)
        gamma = self._pacing.max_gamma
        check_prompt(self._runner, request.index, request.prompt, request.limit, gamma)
        for drafter in self._pacing.drafters:
            drafter.check(self._runner, len(request.prompt) + request.limit + gamma + 1)
        self.expect(request.sampling)
        request.counts, request.taken_by, request.text = Counts.of_gamma(gamma), self._mark, [*request.prompt]
        self._waiting.append(request)

    def expect(self, sampling: SamplingParams) -> None:
        """Let captured rounds be such that they can sample so. Errors: ConfigError if the mode cannot."""
        self._mode = self._mode if sampling.greedy else resolve_mode(self._verification, [sampling])
        self._filters |= Filters.of([sampling])

    def cancel(self, request: Request) -> None:
        """Drop a waiting or running request; its row is free for the next one. A request that has ended stays as it is.
        Errors: ConfigError if it was not submitted here."""
        if request.finish_reason is not None:
            return
        if request.taken_by is not self._mark:
            seen = "not submitted" if request.taken_by is None else "submitted to another decoder"
            what, fix = "a decoder cancels requests that were submitted to it", "cancel it where it was submitted"
            raise ConfigError(what, f"prompt {request.index}", seen, "a request of this decoder", fix)
        request.finish_reason = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        if self._starting and self._starting[1] is request:
            self._starting = None
        if request in self._rows.requests:
            self._rows.leave(self._rows.requests.index(request), request)

    def set_aside(self, kept: KVCache) -> None:
        """Copy what rows hold behind their prompts to another cache, so that another decoder can use the rows for the
        same prompts. `kept` has room for the most tokens that a request may get."""
        self._copy_answers(self._runner.cache, kept)

    def take_back(self, kept: KVCache) -> None:
        """Undo `set_aside`. Tokens that the other decoder added lie ahead of every query until a round forgets them."""
        self._copy_answers(kept, self._runner.cache)
        synchronize(self._runner.device, self._runner.ranks.timeout)

    @torch.inference_mode()
    def _copy_answers(self, source: KVCache, to: KVCache) -> None:
        """Copy entries layer by layer in one thread: waiting for other threads takes longer than these small copies."""
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for row, request in self._rows.busy():
                to.fill_row(row, source, request.length, n_known=len(request.prompt))
        finally:
            torch.set_num_threads(n_threads)

    @torch.inference_mode()
    def step(self) -> RoundStats | None:
        """Prefill waiting requests into free rows, or with `prefill_tokens` a part of one; then run one round. None if
        no row decodes, or the pacing ends the decode. A request whose logits are not finite ends with the reason in its
        `error`; the others go on. Errors: ConfigError if the pacing chooses a gamma that its drafter has not."""
        started = time.perf_counter()
        self._prefill()
        choosing, busy = time.perf_counter(), [request for _, request in self._rows.busy()]
        n_joining = min(self._runner.max_batch - len(busy), len(self._waiting) + bool(self._starting))
        context = sum(request.length for request in busy) / max(1, len(busy))
        choice = self._pacing.choose(len(busy), n_joining, context) if busy else None
        if choice is not None and not all(request.speculate for request in busy):
            choice = PLAIN
        choice_seconds = time.perf_counter() - choosing
        self._last_choice = choice or self._last_choice
        if choice is not None and choice.drafter is not None:
            # Prefilling a drafter is no part of a round, however late it meets the prompt.
            choice = choice if self._catch_up(choice.drafter) else PLAIN
        self.prefill_seconds += time.perf_counter() - started - choice_seconds
        if choice is None:
            return None
        return self._run_round(choice, time.perf_counter() - choice_seconds)  # choosing is part of the round

    def _prefill(self) -> None:
        """Prefill waiting prompts: all, or at most `prefill_tokens` tokens."""
        most, n_run = self._prefill_tokens, 0
        while self._starting or (self._waiting and None in self._rows.requests):
            if not self._starting and most is not None and n_run and n_run + len(self._waiting[0].prompt) > most:
                return
            row, request, chunks = self._starting = self._starting or self._begin(self._waiting.popleft())
            try:
                n_tokens = next(chunks)
            except StopIteration as done:
                self._starting = None
                self._start(row, request, done.value)
                continue
            self._progress.prefilled(n_tokens)
            n_held, n_run = self._rows.advance(row, n_tokens), n_run + n_tokens
            if most is not None:
                last = self._last_choice.drafter
                if last is not None and self._follows_parts(last):
                    self._update(last, [(row, request, n_held)])
                if n_held < len(request.prompt):
                    return

    def _begin(self, request: Request) -> tuple[int, Request, Chunks[Prefilled]]:
        """Give a request a row, with what the row and its drafters keep of an earlier text."""
        reuses = self._reuses == "prefixes"
        row = self._rows.place_for(request.prompt, reuses)
        if self._reuses == "nothing":
            self._runner.cache.prefilled.pop(row, None)
        request.n_reused, chunks = self._runner.start_prefill(row, request.prompt, self._prefill_tokens, reuses)
        # A drafter that has to take back more than a round's drafts may lack what its cache held before those.
        followed = {
            index: min(n, request.n_reused)
            for index, n in self._rows.followed[row].items()
            if reuses and self._follows_parts(index) and n - request.n_reused <= self._pacing.max_gamma + 1
        }
        self._rows.begin(row, request.n_reused, followed)
        return row, request, chunks

    def _start(self, row: int, request: Request, prefilled: Prefilled) -> None:
        """Emit the first token of a prompt that is in its row; the row stays free if that ends it."""
        if prefilled.bad_position is not None:
            request.fail(prefilled.bad_position)
        else:
            mode = GREEDY if request.sampling.greedy else self._mode
            request.emit([first_token(self._runner, mode, request, prefilled.logits)])
            if request.logprobs is not None and self._runner.ranks.leads:
                request.logprobs += logprobs_of([request.tokens], prefilled.logits[None, None])[0]
            self._progress.emitted(1)
        self._rows.requests[row] = request
        if request.finish_reason is not None:
            self._rows.leave(row, request)
            self._progress.finished(request)

    def _follows_parts(self, index: int) -> bool:
        drafter = self._pacing.drafters[index]
        return isinstance(drafter, ModelDrafter) and drafter.follows_parts

    def _catch_up(self, index: int) -> bool:
        """Prefill the drafter with unseen prompts, then synchronise ranks. False: a backlog is left, so this round is
        plain."""
        began = time.perf_counter()
        plan, is_all = self._rows.catch_up_plan(index, self._prefill_tokens if self._follows_parts(index) else None)
        if n_run := self._update(index, plan):
            self._progress.prefilled(n_run)
            synchronize(self._runner.device, self._runner.ranks.timeout)
            self._runner.ranks.gathered(None)
        self.draft_prefill_seconds += time.perf_counter() - began
        return is_all

    def _update(self, index: int, plan: Sequence[tuple[int, Request, int]]) -> int:
        """Let a drafter follow rows up to those lengths; return the number of tokens that it had not seen."""
        updates = []
        for row, request, length in plan:
            if (n_seen := self._rows.followed[row].get(index, 0)) < length:
                text = request.text if length == len(request.text) else request.text[:length]
                updates.append(RowUpdate(row, request.id, text, n_seen, request.draws(self._mode)))
                self._rows.followed[row][index] = length
        self._pacing.drafters[index].follow(updates)
        return sum(len(update.tokens) - update.n_seen for update in updates)

    def _run_round(self, choice: Choice, started: float) -> RoundStats:
        busy = self._rows.busy()
        mode, whole = self._rounds.batch_of_kind([request.sampling for _, request in busy], self._mode, self._filters)
        batch = self._rows.gather(whole)
        round_ = self._rounds.make_round(choice, batch, mode)
        with self._phase("resume"):
            if choice.drafter is not None:
                n_ahead = isinstance(self._pacing.drafters[choice.drafter], HostDrafter)
                self._update(choice.drafter, [(row, request, request.length + n_ahead) for row, request in busy])
        with self._phase("draft"):
            if choice.drafter is not None:
                round_.propose(self._phase)
        with self._phase("verify"):
            round_.verify()
        with self._phase("accept"):
            round_.accept()
            outcomes = dict(zip((row for row, _ in self._rows.computed), round_.outcomes(), strict=True))
        logprobs, n_emitted = [], 0
        if self._runner.ranks.leads and any(request.logprobs is not None for _, request in busy):
            wants = {row for row, request in busy if request.logprobs is not None}
            blocks = [outcomes[row].block if row in wants else [] for row, _ in self._rows.computed]
            logprobs = logprobs_of(blocks, round_.logits)
        for place, (row, request) in enumerate(self._rows.computed):
            if request is None or self._rows.requests[row] is not request:
                continue  # idle, or cancelled meanwhile by whoever was notified of another's end
            n_emitted += (n_kept := request.commit(outcomes[row]))
            if logprobs and request.logprobs is not None:
                request.logprobs += logprobs[place][:n_kept]
            self._progress.decoded(request, outcomes[row], n_kept)
            if choice.drafter is not None:
                self._rows.followed[row][choice.drafter] = request.length
            if request.finish_reason is not None:
                self._rows.leave(row, request)
                self._progress.finished(request)
        self._rows.set_state(batch)
        round_.roll_back()
        self._pacing.observe(choice, [len(outcomes[row].block) - 1 for row, _ in busy])
        seconds = time.perf_counter() - started
        self._progress.emitted(n_emitted)
        return RoundStats(seconds, len(busy), n_emitted, choice._replace(gamma=round_.n_drafts))


class Generation:
    """Prompts on their way through a `Decoder`, step by step. Takes arguments of `make_requests` and `Decoder`."""

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[int] | None = None,
        numbered_from: int = 0,
        stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
        **of_decoder: Any,
    ) -> None:
        self.decoder, self.rounds, self.done = Decoder(runner, **of_decoder), list[RoundStats](), False
        self.requests = make_requests(prompts, max_new_tokens, stop_tokens, sampling, request_ids, numbered_from)
        for request in self.requests:
            self.decoder.submit(request)

    @property
    def n_tokens(self) -> int:
        """Tokens that all rows have emitted so far."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def n_going(self) -> int:
        """Requests that have not ended."""
        return sum(request.finish_reason is None for request in self.requests)

    def run(self, n_tokens: float = math.inf) -> None:
        """Step until `n_tokens` tokens were emitted, or there is nothing left to do."""
        while not self.done and self.n_tokens < n_tokens:
            if (round_ := self.decoder.step()) is None:
                self.done = True
            else:
                self.rounds.append(round_)

    @property
    def output(self) -> GenerateOutput:
        """The tokens, reasons and counts so far."""
        requests, decoder = self.requests, self.decoder
        prefill_seconds = decoder.prefill_seconds, decoder.draft_prefill_seconds
        stats = Stats(tuple(request.counts for request in requests), (tuple(self.rounds),), *prefill_seconds)
        errors = [request.error and f"row {request.index}: {request.error}" for request in requests]
        reasons = [request.finish_reason for request in requests]
        return GenerateOutput([request.tokens for request in requests], reasons, errors, stats)


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
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    **options: Any,
) -> GenerateOutput:
    """Continue every prompt, any number of them of any lengths; return their tokens and counts.

    Args:
        prompts: token ids.
        max_new_tokens, sampling (None: greedy), stop_tokens (which are kept): one value, or one per prompt.
        request_ids: key each prompt's random numbers beside its seed; None: its index. A prompt that keeps id and seed
            keeps its tokens (coupled mode), wherever it stands in the batch.
        drafter, pacing, verification, options: those of `Decoder`.

    Errors: ConfigError, before anything runs, as `Decoder.submit`, or if two prompts share request id and seed.
    """
    requests: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "request_ids": request_ids}
    decoder: dict[str, Any] = {"drafter": drafter, "pacing": pacing, "verification": verification, **options}
    generation = Generation(runner, prompts, stop_tokens=stop_tokens, **requests, **decoder)
    generation.run()
    return generation.output
