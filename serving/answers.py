"""Answers to requests: their growing text, stop strings, server-sent events, and failures as JSON."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import groupby
from statistics import fmean
from typing import Any

from fastapi.responses import Response, StreamingResponse

from bench.record import rounded
from engine.stats import Counts, total
from models.checkpoints.reasoning import TAGS, certain_end, parted
from models.checkpoints.text_stream import LONGEST_CHARACTER, TextStream
from models.checkpoints.tokenizer import Tokenizer
from models.checkpoints.tool_calls import MARKS, ToolCallParser
from serving.scheduler import ServedRequest, Update

EOS, LENGTH, STOP, CANCELLED = "eos_token", "length", "stop_sequence", "cancelled"
REASONS: Mapping[str, str] = {"stop": EOS, "length": LENGTH}
SPECULATION = ("rounds", "drafted", "verified", "accepted", "acceptance_rate", "mean_accepted_length")
# The events of each step of a stream.
Events = AsyncIterator[list[dict[str, Any]]]
# OpenAI's code for a prompt that is too long; clients of text-generation-inference do not know it.
TOO_LONG = "context_length_exceeded"


@dataclass(eq=False)
class Failure(Exception):
    """An error that is sent as an answer. kind: text-generation-inference's `error_type`, and OpenAI's `code` unless
    that is given. param: the name of the wrong field. status: 422 becomes 400 on OpenAI's routes."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None
    code: str | None = None

    def body(self, is_openai: bool) -> dict[str, Any]:
        """Return the JSON of that family of routes."""
        if not is_openai:
            return {"error": self.message, "error_type": "validation" if self.kind == TOO_LONG else self.kind}
        code = self.code or ("invalid_value" if self.kind == "validation" else self.kind)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 424 else "server_error")
        return {"error": {"message": self.message, "type": type_, "param": self.param, "code": code}}


def invalid(param: str, message: str, kind: str = "validation") -> Failure:
    """Return the failure of a request with a wrong field."""
    return Failure(422, kind, f"{param}: {message}", param)


def require(is_right: object, param: str, message: str, kind: str = "validation") -> None:
    """Raise the failure of a request with a wrong field, unless it is right."""
    if not is_right:
        raise invalid(param, message, kind)


def internal(error: Exception) -> Failure:
    return Failure(500, "internal", f"the server has failed ({type(error).__name__})")


@dataclass
class Token:
    """A token of an answer or a prompt. text: its characters, or a control token's name. delta: what it adds to the
    text, which has `offset` characters before it. drafted: whether it is an accepted draft. round: 0 for the prompt's
    prefill. top: the likeliest ids in its place, with their log-probabilities. reasoning, calls: what
    it adds to the reasoning, and to calls of tools."""

    index: int
    id: int
    text: str
    delta: str
    offset: int
    logprob: float | None
    special: bool
    drafted: bool
    round: int
    top: list[tuple[int, float]] = field(default_factory=list)
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def prompt_tokens(prompt: Sequence[int], tokenizer: Tokenizer, specials: Mapping[int, str]) -> list[Token]:
    """Return the tokens of a prompt, without log-probabilities."""
    stream, tokens, offset = TextStream(tokenizer), list[Token](), 0
    for index, id_ in enumerate(prompt):
        text, special = stream.add(id_), specials.get(id_)
        text += stream.rest() if index == len(prompt) - 1 else ""
        tokens.append(Token(index, id_, special or text, text, offset, None, special is not None, False, 0))
        offset += len(text)
    return tokens


def cut(text: str, stops: Sequence[str], keeps: bool, is_last: bool = False) -> tuple[str, bool]:
    """Return a growing text up to its first complete stop string, and whether there is one; if several end there, the
    longest counts. keeps: the text ends after the stop string, else before it; then text that may begin a stop string
    is left out until `is_last`."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if found:
        return text[: min(found)[0 if keeps else 1]], True
    return text[: len(text) if keeps or is_last else certain_end(text, stops)], False


@dataclass(eq=False)
class Answer:
    """The answer to a request, for the event loop alone. specials: names of ids without text. changed: an event that
    all answers to a body share. has_logprobs: whether the client gets log-probabilities. prompt: the tokens of the
    prompt, where the client gets them. received, first, ended: seconds of `time.perf_counter`; `first` is the first
    token's. predicted: draft tokens that were copied from the request's prediction; of these `predicted_accepted` were
    accepted. stops, keeps_stop: see `cut`. begins: whether the text begins with reasoning (see `parted`). tool_calls:
    takes calls of tools out of the text after that."""

    request: ServedRequest
    tokenizer: Tokenizer
    specials: Mapping[int, str]
    stops: Sequence[str]
    keeps_stop: bool
    counts: Counts
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    has_logprobs: bool = True
    prompt: Sequence[Token] = ()
    received: float = field(default_factory=time.perf_counter)
    first: float | None = None
    ended: float | None = None
    finish: str | None = None
    failure: Failure | None = None
    predicted: int = 0
    predicted_accepted: int = 0
    tokens: list[Token] = field(default_factory=list)
    watcher: "asyncio.Task[None] | None" = None  # ends the answer when its client leaves
    begins: bool | None = False
    tool_calls: ToolCallParser = field(default_factory=ToolCallParser)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer)
        self._written, self._reasoning, self._said = "", "", ""  # all text, and its parts that were given out

    def continue_text(self, prompt: Sequence[int]) -> None:
        """Decode the answer as what follows a prompt that is no conversation, before the first token comes."""
        ends = (prompt[-n:] for n in range(1, LONGEST_CHARACTER + 1))
        whole = (end for end in ends if not self.tokenizer.decode(end).endswith("\ufffd"))
        self._stream = TextStream(self.tokenizer, next(whole, ()))

    @property
    def text(self) -> str:
        return "".join(token.delta for token in self.tokens)

    def likeliest(self, token: Token) -> list[tuple[int, str, float]]:
        """Return the likeliest tokens in the place of a token: ids, texts and log-probabilities."""
        return [(id_, token.text if id_ == token.id else self._name(id_), logprob) for id_, logprob in token.top]

    def _name(self, id_: int) -> str:
        """Return a token's text after other text: some tokenizers drop a space at the beginning of a text."""
        decode = self.tokenizer.decode
        return self.specials.get(id_) or decode([id_, id_])[len(decode([id_])) :]

    def take(self, update: Update) -> None:
        """Add an update's tokens, up to a stop string."""
        if self.first is None:
            for token, score in zip(self.prompt[1:], update.request.prompt_logprobs or [], strict=False):
                token.logprob, token.top = score
        self.first, n_before = self.first or update.time, len(self.tokens)
        for place, id_ in enumerate(update.tokens):
            is_last = update.finish == "stop" and place == len(update.tokens) - 1
            is_end = is_last and id_ in self.request.stop_tokens  # no text, even if the tokenizer takes it for some
            text = "" if is_end else self._stream.add(id_)
            special = self._name(id_) if is_end else self.specials.get(id_)
            begins_call = special in MARKS and bool(self.tool_calls.names)
            is_mark = begins_call or (special in TAGS and parted(self._written, self.begins)[1] is None)
            reasoning, delta, has_ended = self._add(text + special if special and is_mark else text)
            offset = sum(last.offset + len(last.delta) for last in (self.tokens or self.prompt)[-1:])
            logprob, top = update.logprobs[place] if update.logprobs else (None, [])
            origin = special is not None, place < update.accepted, update.round
            token = Token(len(self.tokens), id_, special or text, delta, offset, logprob, *origin, top, reasoning)
            token.calls = self.tool_calls.parts
            self.tokens.append(token)
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

    def _add(self, text: str, is_last: bool = False) -> tuple[str, str, bool]:
        """Return what more text adds to the reasoning and to the text after it, and whether it completes a stop
        string."""
        self._written += text
        shown, has_ended = cut(self._written, self.stops, self.keeps_stop, is_last)
        reasoning, said = parted(shown, self.begins, is_last or has_ended)
        new = reasoning[len(self._reasoning) :], (said or "")[len(self._said) :]
        self._reasoning, self._said = reasoning, said or ""
        return new[0], self.tool_calls.add(new[1], is_last or has_ended), has_ended

    def _add_rest(self) -> None:
        """Add to the last token the text that waited for more: half a character, or the beginning of a stop string."""
        if not self.tokens:
            return
        rest, last = self._stream.rest(), self.tokens[-1]
        reasoning, delta, has_ended = self._add(rest, is_last=True)
        last.reasoning += reasoning
        last.delta += delta
        last.calls = last.calls + self.tool_calls.parts
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
        self.changed.set()

    def log(self) -> dict[str, Any]:
        """Return the fields of the request's line in the log, without any text."""
        started, first = self.request.started or self.ended or self.received, self.first
        waits = {"queue_ms": 1e3 * (started - self.received)}
        waits |= {"first_token_ms": 1e3 * (first - self.received)} if first else {}
        return rounded({"finish": self.finish, **waits, **report([self])})


async def batches(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, list[Token]]]:
    """Yield the index of an answer and its tokens of each step, and no tokens when it has ended, until all have.
    Raises the failure of any."""
    n_sent, running = [0] * len(answers), dict(enumerate(answers))
    while running:
        await answers[0].changed.wait()
        answers[0].changed.clear()
        for i, answer in [*running.items()]:
            while answer.first and n_sent[i] < len(answer.prompt) + len(answer.tokens):  # more come while some are sent
                new = [*answer.prompt, *answer.tokens][n_sent[i] :]
                n_sent[i] += len(new)
                yield i, new
            if answer.failure is not None:
                raise answer.failure
            if answer.finish is not None:
                del running[i]
                yield i, []


async def stream(events: Events, is_openai: bool) -> Response:
    """Return server-sent events, written once a step. Raises a failure that comes before the first event."""
    first: list[dict[str, Any]] = await anext(events, [])

    async def lines() -> AsyncIterator[str]:
        try:
            yield _lines(first)
            async for more in events:
                yield _lines(more)
        except Failure as failure:
            yield _lines([failure.body(is_openai)])
        if is_openai:
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _lines(events: Sequence[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def best(answers: Sequence[Answer], n: int) -> list[Answer]:
    """Return `n` samples of each prompt, those with the highest mean log-probability, the best first."""
    means = {answer: fmean([token.logprob or 0.0 for token in answer.tokens] or [0.0]) for answer in answers}
    by_prompt = groupby(answers, key=lambda answer: answer.request.group)
    return [answer for _, samples in by_prompt for answer in nlargest(n, samples, key=means.__getitem__)]


def report(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the first seed, and of all answers `speculation`, and `timings` in ms as in llama.cpp's server."""
    requests, counts = [answer.request for answer in answers], total([answer.counts for answer in answers])
    n_reused, now = sum(request.n_reused for request in requests), time.perf_counter()
    ended = max(answer.ended or now for answer in answers)
    first = min(answer.first or ended for answer in answers)
    timings = {
        "prompt_n": sum(len(request.prompt) for request in requests) - n_reused,
        "cache_n": n_reused,
        "prompt_ms": 1e3 * (first - min(request.started or first for request in requests)),
        "predicted_n": sum(len(answer.tokens) for answer in answers),
        "predicted_ms": 1e3 * (ended - first),
        "draft_n": counts.drafted,
        "draft_n_accepted": counts.accepted,
    }
    speculation = {name: getattr(counts, name) for name in SPECULATION}
    return rounded({"seed": requests[0].sampling.seed, "timings": timings, "speculation": speculation})
