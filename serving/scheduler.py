"""The one user of the Decoder: between rounds requests join and leave it, and after each all are told what they got.

Where ranks share the model the leader decides who joins and leaves, and every rank does the same.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from bench.session import Session
from common.errors import UserError
from engine.decoding import Decoder
from engine.pacing import Pacing
from engine.requests import FinishReason, Progress, Request
from serving.flags import Batch

# While nothing runs, ranks hear of each other so often, in seconds: no collective waits for a request.
HEARTBEAT_SECONDS = 1.0
# The most prompt tokens that run between two rounds.
CPU_PREFILL, GPU_PREFILL = 256, 2048


@dataclass(eq=False)
class Asked(Request):
    """A request of a client, and what has been told of it; its `index` is its number. started: seconds of
    `time.perf_counter`, when it has got a row; 0 before."""

    started: float = 0.0
    n_told: int = 0
    told_drafted: int = 0
    told_accepted: int = 0


class Update(NamedTuple):
    """What a prefill (round 0 of the request) or a round did: the tokens that it emitted, the first `accepted` of them
    as drafted. seen: seconds of `time.perf_counter`. finish: as of the request, which may have gone on meanwhile."""

    request: Asked
    tokens: list[int]
    logprobs: list[float]
    drafted: int
    accepted: int
    round: int
    seen: float
    finish: FinishReason


class Scheduler(Progress):
    """`submit`, `cancel` and `stop` are for any thread of the leader; `run` is for the thread that opened the session,
    on every rank. tell: is called on the leader with what each prefill and each round did."""

    def __init__(self, session: Session, pacing: Pacing, batch: Batch) -> None:
        self.tell: Callable[[list[Update]], None] = lambda updates: None
        self._ranks, self._rows, self._runner = session.ranks, session.runner.max_batch, session.runner
        chunk = batch.prefill_tokens or (CPU_PREFILL if session.runner.device.type == "cpu" else GPU_PREFILL)
        self._decoder = Decoder(
            session.runner,
            pacing,
            verification=batch.verification,
            progress=self,
            prefill_tokens=chunk,
            reuses="nothing" if batch.no_prefix_reuse else "prefixes",
        )
        self._decoder.expect(session.plan.sampling)
        self._inbox: SimpleQueue[Asked | int | None] = SimpleQueue()
        self._waiting: deque[Asked] = deque()
        self._running: dict[int, Asked] = {}
        # Of all rounds so far; between: neither a round nor a prefill, while something decodes.
        self.n_rounds, self.round_seconds, self.between_seconds = 0, 0.0, 0.0
        self._step_began: float | None = None

    def submit(self, request: Asked) -> None:
        self._inbox.put(request)

    def cancel(self, number: int) -> None:
        """Of a request that has ended: does nothing."""
        self._inbox.put(number)

    def stop(self) -> None:
        """End `run` before the next step."""
        self._inbox.put(None)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + self._inbox.qsize()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def step_seconds(self) -> float:
        """What the step that runs has taken; 0 while nothing is asked."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def run(self) -> None:
        """Step until `stop`. Errors: whatever the engine raises; RankError and RuntimeError for a lost rank."""
        while True:
            began, was_idle, prefilled = time.perf_counter(), not self._running, self._decoder.prefill_seconds
            orders = self._ranks.shared(self._orders)
            if orders is None:
                self._runner.drop_graphs()  # as when a benchmark ends (see `finish`)
                return
            self._obey(*orders)
            done = self._decoder.step() if self._running else None
            self.emitted()
            if done is not None:
                rest = time.perf_counter() - began - done.seconds - (self._decoder.prefill_seconds - prefilled)
                self.n_rounds, self.round_seconds = self.n_rounds + 1, self.round_seconds + done.seconds
                self.between_seconds += 0 if was_idle else rest

    def _orders(self) -> tuple[list[Asked], set[int]] | None:
        """Whom every rank submits and cancels before a step; None to stop. While nothing decodes, it waits for them."""
        self._step_began = None
        cancel, waits = set[int](), not self._running and not self._waiting
        timeout = HEARTBEAT_SECONDS if self._ranks.size > 1 else None
        with suppress(Empty):
            while True:
                event = self._inbox.get(waits, timeout)
                waits = False
                if event is None:
                    return None
                if isinstance(event, Asked):
                    self._waiting.append(event)
                elif event in self._running:
                    cancel |= {event}
                else:
                    self._waiting = deque(one for one in self._waiting if one.index != event)
        n_free = self._rows - len(self._running) + len(cancel)
        self._step_began = time.perf_counter()
        return [self._waiting.popleft() for _ in range(min(n_free, len(self._waiting)))], cancel

    def _obey(self, submit: list[Asked], cancel: set[int]) -> None:
        for number in sorted(cancel):  # on every rank alike
            self._decoder.cancel(self._running.pop(number))
        for one in submit:
            one.started = time.perf_counter()
            self._running[one.index] = one
            try:
                self._decoder.submit(one)
            except UserError as error:
                one.finish_reason, one.error = "error", str(error)

    def emitted(self, n_tokens: int = 0) -> None:
        """Tell what is new: behind a prompt's prefill already, before the round that follows."""
        new = [one for one in self._running.values() if len(one.tokens) > one.n_told or one.finish_reason]
        if new:
            self.tell([self._update(one) for one in new])

    def _update(self, one: Asked) -> Update:
        counts = one.counts
        new = one.tokens[one.n_told :], (one.logprobs or [])[one.n_told :]
        done = counts.drafted - one.told_drafted, counts.accepted - one.told_accepted, counts.rounds
        one.n_told, one.told_drafted, one.told_accepted = len(one.tokens), counts.drafted, counts.accepted
        if one.finish_reason is not None:
            del self._running[one.index]
        return Update(one, *new, *done, time.perf_counter(), one.finish_reason)
