"""The event loop's side: requests are checked, counted and handed to the scheduler, and what it tells goes to them."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.requests import Request

from common.errors import UserError
from engine.bench.session import Session
from engine.sampling import SamplingParams
from engine.stats import Counts
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from serving.failures import Failure, invalid, refused
from serving.flags import ServeFlags
from serving.jobs import CANCELLED, Job
from serving.metrics import Metrics
from serving.scheduler import Asked, Scheduler, Update
from serving.stops import Stops

# Seeds that are drawn are whole numbers in every language: JavaScript's end at 2**53.
DRAWN_SEEDS = 2**32
LONGEST_STOP = 256
RETRY_SECONDS = 1


class Service:
    """Everything but `run_soon` is for the event loop."""

    def __init__(self, flags: ServeFlags, session: Session, scheduler: Scheduler) -> None:
        assert session.tokenizer is not None
        self.flags, self.limits, self.session = flags, flags.limits, session
        self.tokenizer, self.scheduler = session.tokenizer, scheduler
        self.metrics, self.jobs, self._numbers = Metrics(session.plan.gamma), dict[int, Job](), count()
        self._rows, self.vocab_size = session.runner.max_batch, session.target.config.vocab_size
        self.max_total = session.plan.capacity - session.plan.gamma - 1
        self.max_input = min(self.limits.max_input_length or self.max_total, self.max_total - 1)
        self.ends = frozenset(session.target.config.eos_tokens)
        self.specials = {index: text for text, index in self.tokenizer.control_tokens().items()}
        # One thread: a tokenizer is switched while it encodes a conversation.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._template: ChatTemplate | None = None
        with suppress(NoChatTemplateError):
            self._template = session.target.chat_template()
        scheduler.tell = lambda updates: self.run_soon(self.told, updates)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ready, self.created = threading.Event(), int(time.time())
        self.down: Failure | None = None
        self.metrics.show("tgi_queue_size", "Requests that wait for a row", lambda: scheduler.n_waiting)
        self.metrics.show("tgi_batch_current_size", "Requests in a row", lambda: scheduler.n_running)
        self.metrics.show("foretoken_rows", "Rows", lambda: self._rows)
        self.metrics.show("foretoken_rounds", "Rounds so far", lambda: scheduler.n_rounds)
        self.metrics.show("foretoken_round_seconds", "Seconds of rounds so far", lambda: scheduler.round_seconds)
        between = "Seconds so far in which something decodes, but in no round and no prefill"
        self.metrics.show("foretoken_between_seconds", between, lambda: scheduler.between_seconds)
        self.metrics.show("foretoken_kv_use", "Share of the KV entries that running requests hold", self._kv_use)

    def begin(self) -> None:
        """On the event loop, before the first request."""
        self._loop = asyncio.get_running_loop()
        self.ready.set()

    def run_soon(self, do: Callable[..., None], *given: Any) -> None:
        """From another thread; when HTTP has ended, there is nobody to tell."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do, *given)

    def _kv_use(self) -> float:
        running = [job for job in self.jobs.values() if job.started is not None]
        held = sum(len(job.request.prompt) + len(job.pieces) for job in running)
        return held / (self._rows * self.session.plan.capacity)

    def require_room(self) -> None:
        """Raises Failure where a request cannot even wait."""
        if self.down is not None:
            raise self.down
        if len(self.jobs) >= self._rows + self.limits.max_queue:
            headers, text = {"Retry-After": str(RETRY_SECONDS)}, "the queue is full: try again later"
            raise Failure(429, "overloaded", text, headers=headers)

    async def encode(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        """A prompt's token ids, made beside the event loop. Raises Failure."""
        self.require_room()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, encode)
        except UserError as error:
            raise refused(param, error) from None

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def conversation(self, messages: Sequence[dict[str, str]], param: str = "messages") -> list[int]:
        """In the model's chat template."""
        if self._template is None:
            raise invalid(param, f"{self.session.name} has no chat template: use /v1/completions or /generate")
        template = self._template
        return await self.encode(lambda: template.encode(messages), param)

    def submit(
        self,
        request: Request,
        prompt: list[int],
        sampling: tuple[float, int, float, int | None],
        max_new_tokens: int | None,
        stops: Sequence[str],
        *,
        names: tuple[str, str, str],
        keeps_stop: bool = False,
        logprobs: bool = False,
        speculate: bool = True,
    ) -> Job:
        """Queue a request, which is cancelled when its client leaves or its time is over.

        sampling: temperature, top_k, top_p and seed, None for one that is drawn. names: what the route calls the
        prompt, the number of new tokens and the stop strings. Raises Failure.
        """
        self.require_room()
        of_prompt, of_length, of_stops = names
        n_prompt, most, n_stops = len(prompt), self.limits.max_new_tokens, self.limits.max_stop_sequences
        room = self.max_total - n_prompt
        limit = min(room, most) if max_new_tokens is None else max_new_tokens
        outside = min(prompt, default=0) < 0 or max(prompt, default=0) >= self.vocab_size
        for is_wrong, param, says in (
            (n_prompt == 0, of_prompt, "is empty"),
            (outside, of_prompt, f"has a token id outside 0 to {self.vocab_size - 1}"),
            (n_prompt > self.max_input, of_prompt, f"has {n_prompt} tokens; this server takes {self.max_input}"),
            (limit > most, of_length, f"is {limit}; this server gives {most}"),
            (limit > room, of_length, f"is {limit}; behind {n_prompt} prompt tokens there is room for {room}"),
            (len(stops) > n_stops, of_stops, f"has {len(stops)} strings; this server takes {n_stops}"),
            (not all(stops), of_stops, "has an empty string"),
            (len(max(stops, key=len, default="")) > LONGEST_STOP, of_stops, f"has more than {LONGEST_STOP} characters"),
        ):
            if is_wrong:
                raise invalid(param, says)
        temperature, top_k, top_p, seed = sampling
        seed = secrets.randbelow(DRAWN_SEEDS) if seed is None else seed
        try:
            params = SamplingParams(temperature, top_k, top_p, seed)
        except UserError as error:
            raise refused("temperature", error) from None
        number, counts = next(self._numbers), Counts.of_gamma(self.session.plan.gamma)
        wanted = Asked(prompt, limit, self.ends, params, index=number, speculate=speculate)
        wanted.logprobs = [] if logprobs else None
        job = Job(wanted, self.tokenizer, self.specials, Stops(stops, keeps_stop), counts)
        self.jobs[number] = request.scope["state"]["job"] = job
        self.scheduler.submit(wanted)
        self._watch(request, job)
        return job

    def _watch(self, request: Request, job: Job) -> None:
        loop = asyncio.get_running_loop()
        seconds = self.limits.request_seconds
        late = Failure(408, "timeout", f"not done within {seconds} seconds")
        timer = loop.call_later(seconds, self.end, job, "timeout", late)

        async def until_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            timer.cancel()
            self.end(job, CANCELLED)

        self.keep(until_gone())

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it beside what goes on."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, job: Job, finish: str, failure: Failure | None = None) -> None:
        """Free its row before the next round; one that has ended stays as it is."""
        if self.jobs.pop(job.request.index, None) is not None:
            self.scheduler.cancel(job.request.index)
            job.end(finish, failure)

    def told(self, updates: Sequence[Update]) -> None:
        """What a step did."""
        for update in updates:
            job = self.jobs.get(update.number)
            if job is None:  # ended meanwhile
                continue
            self.metrics.stepped(update, job.started is None, len(job.request.prompt))
            job.take(update)
            if job.finish is not None:
                del self.jobs[update.number]
                if update.finish is None:  # a stop string
                    self.scheduler.cancel(update.number)

    def fail(self, failure: Failure) -> None:
        """Whatever is asked, or was asked and is not done, is answered with this."""
        self.down = self.down or failure
        for job in [*self.jobs.values()]:
            self.end(job, "error", failure)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and give those that are there so long."""
        self.down = self.down or Failure(503, "unavailable", "the server is shutting down")
        deadline = time.monotonic() + seconds
        while self.jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.fail(Failure(503, "unavailable", f"not done within {seconds} seconds of the server's shutting down"))
