"""The event loop's side: requests are counted and handed to the scheduler, and what it tells goes to them."""

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.requests import Request

from bench.session import Session
from common.errors import UserError
from engine.stats import Counts
from serving.answers import Failure, internal, invalid
from serving.flags import ServeFlags
from serving.jobs import CANCELLED, Job
from serving.metrics import Metrics
from serving.prompts import Prompts, Wanted
from serving.scheduler import Asked, Scheduler, Update
from serving.stops import Stops

RETRY_SECONDS = 1


class Service:
    """Everything but `run_soon` is for the event loop. down: why it takes no more requests, once it does not."""

    def __init__(self, flags: ServeFlags, session: Session, scheduler: Scheduler) -> None:
        self.flags, self.limits = flags, flags.limits
        self.session, self.scheduler = session, scheduler
        self.prompts = Prompts(session, flags.limits)
        read = {
            "tgi_queue_size": lambda: scheduler.n_waiting,
            "tgi_batch_current_size": lambda: scheduler.n_running,
            "foretoken_rows": lambda: session.runner.max_batch,
            "foretoken_rounds_total": lambda: scheduler.n_rounds,
            "foretoken_round_seconds_total": lambda: scheduler.round_seconds,
            "foretoken_between_seconds_total": lambda: scheduler.between_seconds,
            "foretoken_kv_use": self._kv_use,
        }
        self.metrics = Metrics(session.plan.gamma, read)
        self.jobs: dict[int, Job] = {}
        self.down: str | None = None
        self.loop, self.created = asyncio.new_event_loop(), int(time.time())
        self._numbers, self._rows = count(), session.runner.max_batch
        self._ends = frozenset(session.plan.target.config.eos_tokens)
        self._tasks: set[asyncio.Task[None]] = set()
        scheduler.tell = lambda updates: self.run_soon(self.told, updates)

    def run_soon(self, do: Callable[..., None], *given: Any) -> None:
        """From another thread; when HTTP has ended, there is nobody to tell."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(do, *given)

    def _kv_use(self) -> float:
        running = [job for job in self.jobs.values() if job.first is not None]
        held = sum(len(job.request.prompt) + len(job.pieces) for job in running)
        return held / (self._rows * self.session.plan.capacity)

    def require_up(self) -> None:
        """Raises Failure where nothing is answered any more."""
        if self.down is not None:
            raise Failure(503, "unavailable", self.down)

    def require_room(self) -> None:
        """Raises Failure where a request cannot even wait."""
        self.require_up()
        if len(self.jobs) >= self._rows + self.limits.max_queue:
            headers, text = {"Retry-After": str(RETRY_SECONDS)}, "the queue is full: try again later"
            raise Failure(429, "overloaded", text, headers=headers)

    async def encode(self, request: Request, wanted: Wanted) -> Job:
        """Tokenise a prompt for a job that ends when its client leaves or its time is over. Raises Failure for what
        cannot be had; of one that has ended meanwhile, the job says so."""
        self.require_room()
        encoding = self.prompts.encode(wanted)
        number, counts = next(self._numbers), Counts.of_gamma(self.session.plan.gamma)
        asked = Asked([], 0, self._ends, wanted.own.sampling(), index=number, speculate=wanted.own.speculate)
        asked.logprobs = [] if wanted.logprobs else None
        tokenizer, stops = self.prompts.tokenizer, Stops(wanted.own.stops, wanted.keeps_stop)
        job = Job(asked, tokenizer, self.prompts.specials, stops, counts, encoding)
        self.jobs[number] = request.scope["state"]["job"] = job
        self._watch(request, job)
        try:
            asked.prompt = await encoding
        except asyncio.CancelledError:
            if job.finish is None:
                raise
        except UserError as error:
            raise invalid(wanted.of_prompt, f"{error.what}: {error.seen}") from None
        return job

    async def submit(self, request: Request, wanted: Wanted) -> Job:
        """The same, and queue it."""
        self.prompts.check(wanted)
        job = await self.encode(request, wanted)
        if job.finish is None:
            job.request.limit = self.prompts.limit(wanted, job.request.prompt)
            self.scheduler.submit(job.request)
        return job

    def _watch(self, request: Request, job: Job) -> None:
        seconds = self.limits.request_seconds
        # Clients of OpenAI's ask again by themselves after 408 and 5xx, unless told not to.
        late = Failure(504, "timeout", f"not done within {seconds} seconds", headers={"x-should-retry": "false"})
        timer = self.loop.call_later(seconds, self.end, job, "timeout", late)

        async def until_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            timer.cancel()
            self.end(job, CANCELLED)

        self.keep(until_gone())

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it beside what goes on."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, job: Job, finish: str, failure: Failure | None = None) -> None:
        """Free its row before the next round; one that has ended stays as it is."""
        if self.jobs.pop(job.request.index, None) is not None:
            if job.encoding is not None:
                job.encoding.cancel()
            self.scheduler.cancel(job.request.index)
            job.end(finish, failure)

    def told(self, updates: Sequence[Update]) -> None:
        """What a step did. A request that this fails for ends, and the others go on."""
        for update in updates:
            job = self.jobs.get(update.request.index)
            if job is None:  # ended meanwhile
                continue
            self.metrics.stepped(update)
            try:
                job.take(update)
            except Exception as error:
                self.end(job, "error", internal(error))
                traceback.print_exc()
                continue
            if job.finish is not None:
                self.jobs.pop(update.request.index, None)
                if update.finish is None:  # a stop string
                    self.scheduler.cancel(update.request.index)

    def fail(self, why: str) -> None:
        """Whatever is asked, or was asked and is not done, is answered with this."""
        self.down = self.down or why
        for job in [*self.jobs.values()]:
            self.end(job, "error", Failure(503, "unavailable", why))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and give those that are there so long."""
        self.down = self.down or "the server is shutting down"
        deadline = time.monotonic() + seconds
        while self.jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.fail(f"not done within {seconds} seconds of the server's shutting down")
