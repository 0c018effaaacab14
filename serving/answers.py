"""Answers to requests: their growing text, stop strings, and failures as JSON."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.record import rounded
from engine.stats import Counts
from models.checkpoints.text_stream import TextStream
from models.checkpoints.tokenizer import Tokenizer
from serving.scheduler import ServedRequest, Update

EOS, LENGTH, STOP, CANCELLED = "eos_token", "length", "stop_sequence", "cancelled"
REASONS: Mapping[str, str] = {"stop": EOS, "length": LENGTH}
SPECULATION = ("rounds", "drafted", "verified", "accepted", "acceptance_rate", "mean_accepted_length")
# OpenAI's code for a prompt that is too long; clients of text-generation-inference do not know it.
TOO_LONG = "context_length_exceeded"


@dataclass(eq=False)
class Failure(Exception):
    """An error that is sent as an answer. kind: OpenAI's `code`, and text-generation-inference's `error_type`. param:
    the name of the wrong field."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self, is_openai: bool) -> dict[str, Any]:
        """Return the JSON of that family of routes."""
        if not is_openai:
            return {"error": self.message, "error_type": "validation" if self.kind == TOO_LONG else self.kind}
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 424 else "server_error")
        return {"error": {"message": self.message, "type": type_, "param": self.param, "code": self.kind}}


def invalid(param: str, message: str, kind: str = "validation") -> Failure:
    """Return the failure of a request with a wrong field."""
    return Failure(422, kind, f"{param}: {message}", param)


def internal(error: Exception) -> Failure:
    return Failure(500, "internal", f"the server has failed ({type(error).__name__})")


@dataclass
class Token:
    """A token of an answer. text: its characters, or a control token's name. delta: what it adds to the answer, which
    has `offset` characters before it. drafted: whether it is an accepted draft. round: 0 for the prompt's prefill."""

    index: int
    id: int
    text: str
    delta: str
    offset: int
    logprob: float | None
    special: bool
    drafted: bool
    round: int


class Stops:
    """Cuts a growing text at its first complete stop string; if several end there, the longest counts. keeps: the text
    ends behind the stop string, else before it; then text is held back while it may begin a stop string."""

    def __init__(self, stops: Sequence[str], keeps: bool) -> None:
        self._stops, self._keeps, self._text, self._n_sent = stops, keeps, "", 0

    def add(self, text: str, is_last: bool = False) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop string has ended the answer."""
        self._text += text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._text.find(stop)) >= 0]
        if found:
            end = min(found)[0 if self._keeps else 1]
        elif self._keeps or is_last:
            end = len(self._text)
        else:
            starts, rest = range(self._n_sent, len(self._text)), self._text
            end = next((i for i in starts if any(stop.startswith(rest[i:]) for stop in self._stops)), len(rest))
        sent, self._n_sent = self._text[self._n_sent : end], end
        return sent, bool(found)


@dataclass(eq=False)
class Answer:
    """The answer to a request, for the event loop alone. specials: the names of control tokens. received, first, ended:
    seconds of `time.perf_counter`; `first` is the first token's. predicted: draft tokens that were copied from the
    request's prediction; of these `predicted_accepted` were accepted."""

    request: ServedRequest
    tokenizer: Tokenizer
    specials: Mapping[int, str]
    stops: Stops
    counts: Counts
    received: float = field(default_factory=time.perf_counter)
    first: float | None = None
    ended: float | None = None
    finish: str | None = None
    failure: Failure | None = None
    predicted: int = 0
    predicted_accepted: int = 0
    tokens: list[Token] = field(default_factory=list)
    watcher: "asyncio.Task[None] | None" = None  # ends the answer when its client leaves

    def __post_init__(self) -> None:
        self._stream, self._changed = TextStream(self.tokenizer), asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(token.delta for token in self.tokens)

    def take(self, update: Update) -> None:
        """Add an update's tokens, up to a stop string."""
        self.first, n_before = self.first or update.time, len(self.tokens)
        for place, id_ in enumerate(update.tokens):
            text, special = self._stream.add(id_), self.specials.get(id_)
            delta, has_ended = self.stops.add(text)
            offset = self.tokens[-1].offset + len(self.tokens[-1].delta) if self.tokens else 0
            logprob = update.logprobs[place] if update.logprobs else None
            origin = special is not None, place < update.accepted, update.round
            self.tokens.append(Token(len(self.tokens), id_, special or text, delta, offset, logprob, *origin))
            if has_ended:
                self.finish = STOP
                break
        if update.round > 0:
            self.counts.add_round(update.drafted, update.accepted, len(self.tokens) - n_before)
            self.predicted += update.predicted
            self.predicted_accepted += min(update.predicted, update.accepted, len(self.tokens) - n_before)
        if self.finish is None and update.finish is not None:
            self.finish = REASONS.get(update.finish, "error")
            self._add_rest()
            if update.request.error is not None:
                self.failure = Failure(424, "generation", update.request.error)
        self._notify(update.time)

    def _add_rest(self) -> None:
        """Add to the last token the text that waited for more: half a character, or the beginning of a stop string."""
        if not self.tokens:
            return
        rest, last = self._stream.rest(), self.tokens[-1]
        delta, has_ended = self.stops.add(rest, is_last=True)
        last.delta += delta
        last.text += "" if last.special else rest
        if has_ended and self.finish in (EOS, LENGTH):
            self.finish = STOP

    def end(self, finish: str, failure: Failure | None = None) -> None:
        """End the answer from outside. An answer that has ended stays as it is."""
        if self.finish is None:
            self.finish, self.failure = finish, failure
            self._notify(time.perf_counter())

    def _notify(self, now: float) -> None:
        self.ended = now if self.finish else None
        self._changed.set()

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Yield the tokens of each step until the answer ends. Raises its failure."""
        n_sent = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while n_sent < len(self.tokens):  # more may have come while the last ones were written
                new, n_sent = self.tokens[n_sent:], len(self.tokens)
                yield new
            if self.failure is not None:
                raise self.failure
            if self.finish is not None:
                return

    async def wait(self) -> None:
        """Wait for the answer's end. Raises its failure."""
        async for _ in self.batches():
            pass

    def report(self) -> dict[str, Any]:
        """Return `seed`, `speculation`, and `timings` in ms, with the names of llama.cpp's server."""
        counts, n_reused, ended = self.counts, self.request.n_reused, self.ended or time.perf_counter()
        first = self.first or ended
        timings = {
            "prompt_n": len(self.request.prompt) - n_reused,
            "cache_n": n_reused,
            "prompt_ms": 1e3 * (first - (self.request.started or first)),
            "predicted_n": len(self.tokens),
            "predicted_ms": 1e3 * (ended - first),
            "draft_n": counts.drafted,
            "draft_n_accepted": counts.accepted,
        }
        speculation = {name: getattr(counts, name) for name in SPECULATION}
        return rounded({"seed": self.request.sampling.seed, "timings": timings, "speculation": speculation})

    def log(self) -> dict[str, Any]:
        """Return the fields of the request's line in the log, without any text."""
        started, first = self.request.started or self.ended or self.received, self.first
        waits = {"queue_ms": 1e3 * (started - self.received)}
        waits |= {"first_token_ms": 1e3 * (first - self.received)} if first else {}
        return rounded({"finish": self.finish, **waits, **self.report()})
