"""The thread that decodes: requests join and leave the batch between rounds, and updates have their new tokens.

Where ranks share the model, the leader decides which requests join and leave, and every rank does the same.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from tyro.conf import arg

from bench.auto.measure import RunCosts, costs_of
from bench.config import RunConfig, Sizes
from bench.passes import fill_with_noise, make_controller, settle, warm_up
from bench.plan import resolve
from bench.progress import verified_drafts
from bench.session import Session, random_prompts
from common.errors import UserError
from common.jsonl import append_record
from common.say import say
from engine.controller import Controller, Fixed
from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.drafters.standalone import drop_kept_prompts
from engine.requests import FinishReason, Progress, Request, VerifiedRow
from engine.sampling.distribution import Logprob, SamplingParams

# While nothing decodes, ranks exchange a message this often, in seconds, so that no collective times out; and a signal
# that came just before the wait is noticed.
HEARTBEAT_SECONDS = 1.0
# Default of --prefill_tokens.
CPU_PREFILL, GPU_PREFILL = 256, 2048
# Costs are measured after prompts of the plan's typical length, and of that length over SHORTER, since the best draft
# depends on the length of a text.
SHORTER = 16


@dataclass(frozen=True)
class Batch:
    """Sizes of the batch, and how its requests are decoded."""

    max_batch: int = 8  # requests that decode at the same time, each in a row of the KV cache
    max_length: int = 8192
    """KV entries of a row: prompt, new tokens and a round's drafts; no more than the model's context"""
    prefill_tokens: Annotated[int | None, arg(help_behavior_hint="(default: 256 on a CPU, 2048 on a GPU)")] = None
    """the most prompt tokens that run between two rounds, while running requests wait"""
    no_prefix_reuse: bool = False  # run every prompt whole, and draft by no other request's text
    verification: Literal["coupled", "rejection"] = "coupled"
    """coupled: a seed gives the tokens of plain decoding, whatever else runs; rejection: speculative sampling, which
    accepts a little more"""
    log_verification: str | None = None
    """append to this file a JSON line for each verified draft token, as the benchmarks do; `request` is the `id` of the
    request's line on standard error. Rounds are then slower"""


@dataclass(eq=False)
class ServedRequest(Request):
    """A client's request for the decoder; `index` is its number. n_published, drafted, accepted: numbers of tokens and
    drafts that updates have reported."""

    n_published: int = 0
    drafted: int = 0
    accepted: int = 0


# A request to submit, the number of a request to cancel, or None to stop.
Order: TypeAlias = ServedRequest | int | None


class Update(NamedTuple):
    """The tokens of a request from its prefill (round 0) or from a round; the first `accepted` were drafted. time:
    seconds of `time.perf_counter`. finish: the request's finish reason, or None if it continues. predicted: how many of
    the first drafts were copied from the request's prediction."""

    request: ServedRequest
    tokens: list[int]
    logprobs: list[Logprob]
    drafted: int
    accepted: int
    round: int
    time: float
    finish: FinishReason
    predicted: int = 0


class Scheduler(Progress):
    """The only user of a session's `Decoder`. `submit`, `cancel` and `stop` are for any thread of the leader; `run` is
    for the thread that opened the session, on every rank.

    requests: those that have not ended, by number, waiting ones included. publish: called on the leader with the
    updates of each prefill and each round. round_seconds: seconds in rounds. between_seconds: seconds in neither a
    round nor a prefill while there are requests. step_began: when the present step began, by `time.perf_counter`; None
    while idle."""

    def __init__(self, session: Session, controller: Controller, batch: Batch) -> None:
        self.publish: Callable[[list[Update]], None] = lambda updates: None
        self.n_rounds, self.round_seconds, self.between_seconds = 0, 0.0, 0.0
        self.verification, self._ranks, self._runner = batch.verification, session.ranks, session.runner
        self._run, self._log, self._verified = session.run, batch.log_verification, list[dict[str, Any]]()
        self.observes = self._log is not None
        chunk = batch.prefill_tokens or (CPU_PREFILL if session.runner.device.type == "cpu" else GPU_PREFILL)
        how: dict[str, Any] = {"verification": batch.verification, "progress": self, "prefill_tokens": chunk}
        how["reuses"] = "nothing" if batch.no_prefix_reuse else "prefixes"
        self._decoder = Decoder(session.runner, controller, **how)
        self._decoder.expect(session.plan.sampling)
        self._inbox: SimpleQueue[Order] = SimpleQueue()
        self.requests: dict[int, ServedRequest] = {}
        self.step_began: float | None = None

    def submit(self, request: ServedRequest) -> None:
        self._inbox.put(request)

    def cancel(self, index: int) -> None:
        """Free the request's row before the next round. A request that has ended stays as it is."""
        self._inbox.put(index)

    def stop(self) -> None:
        """End `run` before the next step."""
        self._inbox.put(None)

    def run(self) -> None:
        """Step until `stop`. Errors: whatever the engine raises; RankError and RuntimeError for a lost rank."""
        while True:
            began, was_idle, prefilled = time.perf_counter(), not self.requests, self._decoder.prefill_seconds
            orders = self._ranks.broadcast_object(self._orders)
            if None in orders:
                self._runner.drop_graphs()  # a communicator waits for graphs that it is part of
                return
            for order in orders:
                self._obey(order)
            done = self._decoder.step() if self.requests else None
            self.emitted()
            self._log_verified()
            if done is not None:
                rest = time.perf_counter() - began - done.seconds - (self._decoder.prefill_seconds - prefilled)
                self.n_rounds, self.round_seconds = self.n_rounds + 1, self.round_seconds + done.seconds
                self.between_seconds += 0 if was_idle else rest

    def _orders(self) -> list[Order]:
        """Return what has come for every rank to obey before a step. Waits while there is nothing to do."""
        self.step_began = None
        orders, waits = list[Order](), not self.requests
        with suppress(Empty):
            while True:
                orders.append(self._inbox.get(waits, HEARTBEAT_SECONDS))
                waits = False
        self.step_began = time.perf_counter()
        return orders

    def _obey(self, order: Order) -> None:
        if isinstance(order, ServedRequest):
            self.requests[order.index] = order
            try:
                self._decoder.submit(order)
            except UserError as error:
                order.finish_reason, order.error = "error", str(error)
        elif order in self.requests:
            self._decoder.cancel(self.requests.pop(order))

    def emitted(self, n_tokens: int = 0) -> None:
        """Publish new tokens; the first token after a prompt is published before the round that follows."""
        requests = list(self.requests.values())
        new = [request for request in requests if len(request.tokens) > request.n_published or request.finish_reason]
        if new:
            self.publish([self._update(request) for request in new])

    def verified(self, row: VerifiedRow) -> None:
        if self._log is not None:
            self._verified.extend({"run": self._run} | line for line in verified_drafts(row))

    def _log_verified(self) -> None:
        """Append the round's verified draft tokens to their file; if that fails, say so, and log no more: rounds stay
        as slow as they are with a log."""
        if self._verified and self._log is not None:
            try:
                append_record(self._log, *self._verified)
            except UserError as error:
                self._log = None
                say(f"warning: from now on no draft tokens are logged: {error.what} ({error.seen})")
        self._verified.clear()

    def _update(self, request: ServedRequest) -> Update:
        counts, n = request.counts, request.n_published
        tokens, logprobs = request.tokens[n:], (request.logprobs or [])[n:]
        drafted, accepted = counts.drafted - request.drafted, counts.accepted - request.accepted
        request.n_published, request.drafted, request.accepted = len(request.tokens), counts.drafted, counts.accepted
        if request.finish_reason is not None:
            del self.requests[request.index]
        reason, now, n = request.finish_reason, time.perf_counter(), min(request.n_predicted, drafted)
        return Update(request, tokens, logprobs, drafted, accepted, counts.rounds, now, reason, n)


def open_session(config: RunConfig, batch: Batch) -> tuple[Session, Controller]:
    """Open a session without prompts, with a row for each request of a batch, and the controller of its rounds. Costs
    are measured on random entries. Errors: UserError."""
    plan = resolve(replace(config, sizes=Sizes(B=batch.max_batch)), max_length=batch.max_length)
    session = Session.of_plan(plan, options=batch)
    if session.runner.graphs is not None:
        # Clients may sample, with filters: rounds are captured for that from the start.
        session = replace(session, plan=replace(plan, sampling=SamplingParams(1.0, top_p=0.5)))
    if not plan.candidates:
        settle()
        return session, Fixed(None)
    drafters, noise = session.drafters(), _with_noise(session, plan.target.prefix_len)
    if plan.chooses or plan.config.target.compile or session.runner.graphs is not None:
        warm_up(noise, drafters)
    lengths = {max(1, plan.target.prefix_len // SHORTER), plan.target.prefix_len} if plan.chooses else set()
    costs = [_costs_after(session, drafters, length) for length in sorted(lengths)]
    session.runner.cache.prefilled.clear()  # no request begins with the random prompts
    drop_kept_prompts(drafters)
    settle()
    return session, make_controller(noise, drafters, *costs)


def _with_noise(session: Session, length: int) -> Session:
    """Return the session with random prompts of this length, of which its rows hold random entries."""
    prompts = random_prompts(session.runner.vocab_size, session.plan.target.n_rows, length)
    fill_with_noise(session.runner, prompts)
    return replace(
        session, plan=replace(session.plan, target=replace(session.plan.target, prefix_len=length)), prompts=prompts
    )


def _costs_after(session: Session, drafters: Sequence[Drafter], length: int) -> RunCosts:
    """Return the costs of rounds after random entries, without their acceptance, which says nothing of text."""
    costs = costs_of(_with_noise(session, length), drafters, n_steps=math.inf)
    assert costs is not None, "something is to be chosen"
    by_rows = {n: [replace(cost, acceptance=None) for cost in each] for n, each in costs.by_rows.items()}
    return replace(costs, by_rows=by_rows)
