"""The event loop's side: requests are checked, counted and handed to the scheduler, and what it tells goes to them."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request

from common.errors import UserError
from engine.bench.session import Session
from engine.stats import Counts
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from serving.answers import Failure, invalid, refused
from serving.flags import ServeFlags
from serving.jobs import CANCELLED, Job
from serving.metrics import Metrics
from serving.scheduler import Asked, Scheduler, Update
from serving.schemas import Decoding
from serving.stops import Stops

LONGEST_STOP = 256
RETRY_SECONDS = 1
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Wanted:
    """What a route asks for. encode: makes the prompt, of texts of n_chars characters. of_prompt, of_length: what the
    route calls the prompt and the number of new tokens; within: what stands before the names of `own`."""

    own: Decoding
    encode: Callable[[], list[int]]
    n_chars: int
    max_new_tokens: int | None
    of_prompt: str
    of_length: str
    within: str = ""
    keeps_stop: bool = False
    logprobs: bool = False


def require(*checks: tuple[bool, str, str]) -> None:
    """Of each check whether it fails, the name of the parameter, and what to say. Raises Failure of the first."""
    for fails, param, says in checks:
        if fails:
            raise invalid(param, says)


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
        self._longest_piece = max(len(piece) for piece in self.tokenizer.pieces() if piece)
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

    def encode(self, encode: Callable[[], Encoded], n_chars: int, param: str) -> "asyncio.Future[Encoded]":
        """A prompt of so many characters, tokenised beside the event loop. Raises Failure."""
        self.require_room()
        most = self.max_input * self._longest_piece
        require((n_chars > most, param, f"has {n_chars} characters; this server takes {most}"))
        return asyncio.get_running_loop().run_in_executor(self._tokenizing, encode)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def conversation(self, messages: Sequence[dict[str, str]], param: str) -> Callable[[], list[int]]:
        """What tokenises it in the model's chat template. Raises Failure."""
        template = self._template
        if template is None:
            raise invalid(param, f"{self.session.name} has no chat template: use /v1/completions or /generate")
        return lambda: template.encode(messages)

    async def submit(self, request: Request, wanted: Wanted) -> Job:
        """Tokenise and queue a request, which is cancelled when its client leaves or its time is over. Raises Failure
        for what cannot be had; of one that has ended meanwhile, the job says so."""
        self._check(wanted)
        encoding = self.encode(wanted.encode, wanted.n_chars, wanted.of_prompt)
        number, counts = next(self._numbers), Counts.of_gamma(self.session.plan.gamma)
        asked = Asked([], 0, self.ends, wanted.own.sampling(), index=number, speculate=wanted.own.speculate)
        asked.logprobs = [] if wanted.logprobs else None
        job = Job(asked, self.tokenizer, self.specials, Stops(wanted.own.stops, wanted.keeps_stop), counts, encoding)
        self.jobs[number] = request.scope["state"]["job"] = job
        self._watch(request, job)
        try:
            asked.prompt = await encoding
            asked.limit = self._limit(wanted, asked.prompt)
        except asyncio.CancelledError:
            if job.finish is None:
                raise
        except UserError as error:
            self._refuse(job, refused(wanted.of_prompt, error))
        except Failure as failure:
            self._refuse(job, failure)
        if job.finish is None:
            self.scheduler.submit(asked)
        return job

    def _refuse(self, job: Job, failure: Failure) -> NoReturn:
        self.end(job, "refused", failure)
        raise failure from None

    def _check(self, wanted: Wanted) -> None:
        """Raises Failure for what cannot be had behind any prompt."""
        limits, within, stops = self.limits, wanted.within, wanted.own.stops
        most, n_stops, length = limits.max_new_tokens, limits.max_stop_sequences, wanted.max_new_tokens or 0
        plain, of_stops = limits.no_plain_requests and not wanted.own.speculate, f"{within}stop"
        require(
            (length > most, wanted.of_length, f"is {length}; this server gives {most}"),
            (len(stops) > n_stops, of_stops, f"has {len(stops)} strings; this server takes {n_stops}"),
            (not all(stops), of_stops, "has an empty string"),
            (len(max(stops, key=len, default="")) > LONGEST_STOP, of_stops, f"has more than {LONGEST_STOP} characters"),
            (plain, f"{within}speculate", "is false; this server has no plain rounds on demand"),
        )

    def _limit(self, wanted: Wanted, prompt: Sequence[int]) -> int:
        """New tokens behind this prompt. Raises Failure."""
        n_prompt, of_prompt, most = len(prompt), wanted.of_prompt, self.limits.max_new_tokens
        outside = min(prompt, default=0) < 0 or max(prompt, default=0) >= self.vocab_size
        room = self.max_total - n_prompt
        limit = min(room, most) if wanted.max_new_tokens is None else wanted.max_new_tokens
        require(
            (n_prompt == 0, of_prompt, "is empty"),
            (outside, of_prompt, f"has a token id outside 0 to {self.vocab_size - 1}"),
            (n_prompt > self.max_input, of_prompt, f"has {n_prompt} tokens; this server takes {self.max_input}"),
            (limit > room, wanted.of_length, f"is {limit}; behind {n_prompt} prompt tokens there is room for {room}"),
        )
        return limit

    def _watch(self, request: Request, job: Job) -> None:
        loop = asyncio.get_running_loop()
        seconds = self.limits.request_seconds
        # Clients of OpenAI's ask again by themselves after 408 and 5xx, unless told not to.
        late = Failure(504, "timeout", f"not done within {seconds} seconds", headers={"x-should-retry": "false"})
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
            if job.encoding is not None:
                job.encoding.cancel()
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
