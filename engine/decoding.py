"""Decoder: requests come and go while it steps; a step prefills waiting prompts, then runs a round."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch

from common.errors import refuse
from engine.controller import PLAIN, Controller, Fixed, RoundChoice
from engine.draft_sync import DraftSync
from engine.drafters import Drafter
from engine.modes import GREEDY
from engine.requests import Outcome, Progress, Request, VerifiedRow, check_prompt
from engine.round import Round, Rounds, first_token
from engine.rows import Rows
from engine.runner import ModelRunner, Prefill
from engine.sampling.distribution import SamplingParams
from engine.scores import score_prompt, scores_of
from engine.stats import Counts, RoundStats, RowRound
from engine.timing import synchronize
from kv_cache import KVCache
from kv_cache.base import Prefilled

Phase = Callable[[str], AbstractContextManager[object]]
Reuse = Literal["prefixes", "prompts", "nothing"]


class Decoder:
    """Continues requests in the rows of a runner's cache, of which it is the only user meanwhile.

    Rows are independent: each has a length, accepted count, stop tokens and limit, and the row of a request that ended
    or was cancelled takes the next waiting one. In the greedy and the coupled mode a request's tokens are those of
    plain decoding in that mode; in the rejection mode they have the distribution of plain decoding. Ranks that share a
    model submit and cancel alike.

    Args:
        runner: the target and its cache, whose `max_batch` is the number of rows.
        controller: chooses a drafter and gamma before each round, or ends the decode. `drafter`: the only one, always
            to gamma. With neither it is plain decoding.
        verification: "greedy", "rejection" (speculative sampling), "coupled" (sampled tokens that depend on seed,
            request id and text alone), or "auto": greedy until a request samples, then rejection.
        phase: a context manager factory around "resume", "draft", "verify" and "accept" of every round, for timing.
        prefill_tokens: the most tokens of a prompt that run between two rounds; None: all prompts that find a row.
        reuses: the text of an earlier request in its row that a prompt need not run again: "prefixes", all that both
            begin with; "prompts", a whole prompt; "nothing", so that the work for a prompt does not depend on earlier
            ones (with `--keep_answers`, drafts still depend on other answers).

    `prefill_seconds` are spent outside of rounds; `draft_prefill_seconds` are the drafters' part of them. Errors:
    ConfigError for the mode.
    """

    def __init__(
        self,
        runner: ModelRunner,
        controller: Controller | None = None,
        *,
        drafter: Drafter | None = None,
        verification: str = "auto",
        progress: Progress | None = None,
        phase: Phase | None = None,
        prefill_tokens: int | None = None,
        reuses: Reuse = "prompts",
    ) -> None:
        assert controller is None or drafter is None, "a controller brings its drafters"
        self.prefill_seconds = self.draft_prefill_seconds = 0.0
        self._runner, self._controller = runner, controller or Fixed(drafter)
        self._progress = Progress() if progress is None else progress  # which may be falsy, such as an empty list
        self._phase = phase or nullcontext
        self._prefill_tokens, self._reuses = prefill_tokens, reuses
        self._waiting, self._rows = deque[Request](), Rows(runner)
        # The row of the first waiting request, while its prompt is being prefilled.
        self._starting: tuple[int, Request, Prefill] | None = None
        # The request that tokens are being added to; True in a step, and after it if recovering was interrupted.
        self._adding_to, self._is_torn = list[Request](), False
        self._has_old_graphs = False  # of rounds before an exception
        observes, self._last_choice = self._progress.observes, PLAIN
        self._rounds = Rounds(runner, self._controller.drafters, verification, observes)
        self._sync = DraftSync(self._controller.drafters, runner.max_batch)

    @property
    def idle(self) -> bool:
        """True if no request waits, is prefilled or decodes."""
        return not (self._waiting or self._rows.busy())

    def submit(self, request: Request) -> None:
        """Queue a request; it starts in a step that finds a free row, and `tokens` grows from then on.

        Requests of the same id and seed share their random numbers. Errors: ConfigError, and the request is not queued,
        if its prompt is empty, if prompt or sampling have ids outside the vocabulary, if prompt + limit + gamma + 1
        exceeds the model's context, the cache or a draft's cache, if the mode cannot verify its sampling, or if it was
        submitted before.
        """
        if request.text:
            where, fix = f"prompt {request.index}", "make another Request of the same prompt"
            refuse(where, f"it has {len(request.tokens)} tokens", "a new request", "a request is submitted once", fix)
        gamma = self._controller.max_gamma
        limit = request.limit or int(request.prompt_logprobs is not None)
        check_prompt(self._runner, request.index, request.prompt, limit, gamma, request.sampling.ids)
        for drafter in self._controller.drafters:
            drafter.check(self._runner, len(request.prompt) + request.limit + gamma + 1)
        self.expect(request.sampling)
        request.counts, request.text = Counts.of_gamma(gamma), [*request.prompt]
        self._waiting.append(request)

    def expect(self, sampling: SamplingParams) -> None:
        """Prepare captured rounds for requests that sample so. Errors: ConfigError if the mode cannot verify them."""
        self._rounds.expect(sampling)

    def cancel(self, request: Request) -> None:
        """Drop a waiting or running request; its row is free for the next one. A request that has ended stays as it is.
        Errors: ConfigError if it was not submitted here."""
        if request.finish_reason is not None:
            return
        if request in self._waiting:
            self._waiting.remove(request)
            if self._starting and self._starting[1] is request:
                self._starting = None
        elif request in self._rows.requests:
            self._rows.leave(self._rows.requests.index(request), request)
        else:
            what, fix = "a decoder cancels requests that were submitted to it", "cancel it where it was submitted"
            refuse(f"prompt {request.index}", "another request", "its request", what, fix)
        request.finish_reason = "cancelled"

    @torch.inference_mode()
    def copy_answers(self, source: KVCache, to: KVCache) -> None:
        """Copy the entries after the rows' prompts to another cache, so that another decoder can use the rows for the
        same prompts, or back. Tokens that it added lie ahead of every query until a round forgets them. A cache for
        them has room for the most tokens that a request may get."""
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waiting for other threads takes longer than these small copies
        try:
            for row, request in self._rows.busy():
                to.fill_row(row, source, request.length, n_known=len(request.prompt))
        finally:
            torch.set_num_threads(n_threads)

    @torch.inference_mode()
    def step(self) -> RoundStats | None:
        """Prefill waiting requests into free rows, or with `prefill_tokens` a part of a prompt; then run a round.

        Returns None if no row decodes, yet (`is_prefilling`) or any more, or the controller ends the decode. A request
        whose logits are not finite ends with the reason in its `error`; other requests go on. So they do after any
        exception, in the next step: each request then has the tokens of whole rounds, or has ended with an error. Some
        callbacks may not have run.
        """
        with self._recovering():
            self._admit()
            started, prefill_seconds = time.perf_counter(), self.prefill_seconds
            choice = self._choose()
            if choice is None:
                return None
            choice = self._catch_up(choice)
            return self._run_round(choice, started + self.prefill_seconds - prefill_seconds)

    @property
    def is_prefilling(self) -> bool:
        """True while prompts wait and no row decodes: with `prefill_tokens`, the first prompt takes several steps."""
        return bool(self._waiting) and not self._rows.busy()

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Recover from an exception in a step; before the step, from an interrupted recovery."""
        if self._is_torn:
            self._recover()
        if self._has_old_graphs:
            self._drop_graphs()
        self._is_torn = True
        try:
            yield
            self._is_torn = False
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Make requests, rows and drafters fit each other again.

        A row with a request has the entries of its text; rounds overwrite later entries before queries see them.
        Other rows and the drafters forget all: a prompt that was being prefilled begins anew. A request that tokens
        were being added to ends with an error. With other ranks, which may be elsewhere, all requests do.
        """
        self._has_old_graphs, is_alone = True, self._runner.ranks.size == 1
        others = [] if is_alone else [*self._waiting, *(request for _, request in self._rows.busy())]
        for request in [*self._adding_to, *others]:
            request.finish_reason, request.error = "error", "an exception interrupted the decoder"
        self._waiting = deque(request for request in self._waiting if request.finish_reason is None)
        self._starting = None
        self._rows.forget_free()
        self._sync = DraftSync(self._controller.drafters, self._runner.max_batch)
        self._is_torn = False
        if is_alone:  # else before the next step: this waits for kernels, which may wait for a lost rank
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._rounds.drop()
        self._has_old_graphs = False

    def _admit(self) -> None:
        """Prefill waiting prompts: all, or at most `prefill_tokens` tokens."""
        began = time.perf_counter()
        limit, n_run = self._prefill_tokens, 0
        while self._waiting and None in self._rows.requests:
            if not self._starting and limit is not None and n_run and n_run + len(self._waiting[0].prompt) > limit:
                break
            row, request, prefill = self._starting = self._starting or self._begin(self._waiting[0])
            if not prefill.n_left:
                self._starting = None
                self._start(row, request, prefill.finish())
                continue
            n_run += self._run_chunk(row, request, prefill)
            if limit is not None and prefill.n_left:
                break
        self.prefill_seconds += time.perf_counter() - began

    def _begin(self, request: Request) -> tuple[int, Request, Prefill]:
        """Give a request a row, and start its prefill after the tokens that the row may reuse."""
        reuses, group = self._reuses == "prefixes", request.group
        siblings = (row for row, other in self._rows.busy() if group is not None and other.group == group)
        sibling = next(siblings, None)
        row = self._rows.place_for(request.prompt, reuses)
        tap = None if request.prompt_logprobs is None else partial(score_prompt, self._runner, request)
        if self._reuses == "nothing" or tap is not None:
            self._runner.cache.prefilled.pop(row, None)
        if sibling is not None and tap is None:
            self._runner.copy_prompt(sibling, row)
        prefill = Prefill(self._runner, row, request.prompt, self._prefill_tokens, reuses, tap)
        request.started, request.n_reused = time.perf_counter(), prefill.n_reused
        self._rows.begin(row, request.n_reused)
        # Drafters do not copy rows, and follow the last token of each prompt, from which heads begin.
        n_followed = min(request.n_reused, len(request.prompt) - 1) if reuses and sibling is None else 0
        self._sync.begin(row, n_followed, self._controller.max_gamma + 1)
        return row, request, prefill

    def _run_chunk(self, row: int, request: Request, prefill: Prefill) -> int:
        """Run a chunk of a prompt, and where rounds wait for chunks let the drafter follow it; return its tokens."""
        n_tokens, last = prefill.run_chunk(), self._last_choice.drafter
        self._progress.prefilled(n_tokens)
        n_held = len(request.prompt) - prefill.n_left
        self._rows.begin(row, n_held)
        drafters = self._controller.drafters
        if self._prefill_tokens is not None and last is not None and drafters[last].follows_parts:
            self._sync.follow(last, [(row, request, n_held)], self._rounds.mode)
        return n_tokens

    def _start(self, row: int, request: Request, prefilled: Prefilled) -> None:
        """Emit the first token of a prompt that is in its row; the row is free again if that ends it."""
        tokens = list[int]()
        if prefilled.bad_position is None:
            mode = GREEDY if request.sampling.greedy else self._rounds.mode
            tokens = [first_token(self._runner, mode, request, prefilled.logits)][: request.limit]
        (logprobs,) = scores_of(self._runner, [request], [tokens], prefilled.logits[None, None])
        self._adding_to = [request]
        self._rows.requests[row] = self._waiting.popleft()
        request.emit(tokens)
        if prefilled.bad_position is not None:
            request.fail(prefilled.bad_position)
        if request.logprobs is not None:
            request.logprobs += logprobs
        self._adding_to = []
        self._progress.emitted(len(tokens))
        if self._rows.requests[row] is request:  # not cancelled meanwhile
            self._leave_if_done(row, request)

    def _leave_if_done(self, row: int, request: Request) -> None:
        if request.finish_reason is not None:
            self._rows.leave(row, request)
            self._progress.finished(request)

    def _choose(self) -> RoundChoice | None:
        """Return the next round's choice; None if no row decodes, or the controller ends the decode."""
        busy = [request for _, request in self._rows.busy()]
        if not busy:
            return None
        n_joining = min(self._runner.max_batch - len(busy), len(self._waiting))
        choice = self._controller.choose(len(busy), n_joining, sum(request.length for request in busy) / len(busy))
        if choice is None:
            return None
        if not all(request.speculate for request in busy):
            return PLAIN
        forced = [len(request.grammar.forced()) if request.grammar else 0 for request in busy]
        n_forced = min(max(forced), self._controller.max_gamma)
        # Where grammars force all that the drafter would draft, it does not run, and catches up later.
        return RoundChoice(None, n_forced) if min(forced) >= max(choice.gamma, 1) else choice

    def _catch_up(self, choice: RoundChoice) -> RoundChoice:
        """Let the chosen drafter follow prompts that it has not seen, then synchronise ranks; the time for this is no
        part of a round. Returns the choice of a plain round while a backlog is left."""
        self._last_choice = choice
        if choice.drafter is None:
            return choice
        began, limit = time.perf_counter(), self._prefill_tokens
        n_run, is_all = self._sync.catch_up(choice.drafter, self._rows.busy(), limit, self._rounds.mode)
        if n_run:
            self._progress.prefilled(n_run)
            synchronize(self._runner.device, self._runner.ranks.timeout)
            self._runner.ranks.all_gather_object(None)
        seconds = time.perf_counter() - began
        self.prefill_seconds += seconds
        self.draft_prefill_seconds += seconds
        return choice if is_all else PLAIN

    def _run_round(self, choice: RoundChoice, started: float) -> RoundStats:
        """Run a round of the busy rows, and commit its tokens; its time counts from `started`."""
        busy, round_ = self._rows.busy(), self._rounds.next(choice, self._rows)
        with self._phase("resume"):
            self._sync.follow_round(choice.drafter, busy, self._rounds.mode)
        outcomes = round_.run(self._phase)
        rows = self._commit(choice.drafter, outcomes, round_)
        self._rows.set_state(round_.batch)
        round_.roll_back()
        computed = zip(self._rows.computed, outcomes, strict=True)
        self._controller.observe(choice, [len(outcome.block) - 1 for (_, request), outcome in computed if request])
        seconds, drafted = time.perf_counter() - started, choice._replace(gamma=round_.n_drafts)
        self._progress.emitted(n_emitted := sum(row.emitted for row in rows))
        return RoundStats(seconds, len(busy), n_emitted, drafted, tuple(rows))

    def _commit(self, drafter: int | None, outcomes: Sequence[Outcome], round_: Round) -> list[RowRound]:
        """Emit each computed row's block, and free the rows that are done; return each row's part in the round."""
        requests, blocks = [request for _, request in self._rows.computed], [outcome.block for outcome in outcomes]
        rows, logprobs = list[RowRound](), scores_of(self._runner, requests, blocks, round_.logits)
        is_observed = self._progress.observes and self._runner.ranks.leads and round_.n_drafts > 0
        p, q = round_.logprobs() if is_observed else (None, None)
        each = zip(self._rows.computed, outcomes, logprobs, strict=True)
        for i, ((row, request), outcome, of_block) in enumerate(each):
            if request is None or self._rows.requests[row] is not request:
                continue  # idle, or cancelled meanwhile, by a callback of another request's end
            self._adding_to, n_followed = [request], request.length
            part = request.commit(outcome)
            rows.append(part)
            if request.logprobs is not None:
                request.logprobs += of_block[: part.emitted]
            self._adding_to = []
            request.n_predicted = 0
            if drafter is not None:
                # After forced tokens the drafter has followed other drafts than those that were verified.
                self._sync.lengths[row][drafter] = n_followed if i in round_.forced else request.length
                if request.grammar is None:  # else forced tokens may stand in the place of predicted ones
                    request.n_predicted = self._controller.drafters[drafter].n_predicted.get(row, 0)
            if p is not None and (n := len(outcome.drafts)):
                of_drafts, start = None if q is None else q[i, :n], len(request.text) - part.emitted
                self._progress.verified(VerifiedRow(request, start, outcome.drafts, part, p[i, : n + 1], of_drafts))
            self._progress.decoded(request, outcome, part.emitted)
            self._leave_if_done(row, request)
        return rows
