"""A request on the event loop's side: its text as it grows, why it ended, and what speculation did for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.record import rounded
from engine.stats import Counts
from models.checkpoints.text_stream import TextStream
from models.checkpoints.tokenizer import Tokenizer
from serving.answers import Failure
from serving.scheduler import Asked, Update
from serving.stops import Stops

EOS, LENGTH, STOP, CANCELLED = "eos_token", "length", "stop_sequence", "cancelled"
REASONS: Mapping[str, str] = {"stop": EOS, "length": LENGTH}
SPECULATION = ("rounds", "drafted", "verified", "accepted", "acceptance_rate", "mean_accepted_length")


@dataclass
class Piece:
    """A token. text: its own, whole characters, for a control token its name; shown: what of the answer it adds. round:
    0 for the token that follows the prompt; drafted: whether it is a draft that was accepted."""

    id: int
    text: str
    shown: str
    logprob: float | None
    special: bool
    drafted: bool
    round: int


@dataclass
class Job:
    """request: what was asked of the scheduler. specials: the names of control tokens. encoding: of its prompt."""

    request: Asked
    tokenizer: Tokenizer
    specials: Mapping[int, str]
    stops: Stops
    counts: Counts
    encoding: "asyncio.Future[list[int]] | None" = None
    received: float = field(default_factory=time.perf_counter)
    first: float | None = None
    ended: float | None = None
    finish: str | None = None
    failure: Failure | None = None
    pieces: list[Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream, self._changed = TextStream(self.tokenizer), asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(piece.shown for piece in self.pieces)

    def take(self, update: Update) -> None:
        """Add what a step emitted, up to a stop string."""
        self.first = self.first or update.seen
        n_before = len(self.pieces)
        for place, token in enumerate(update.tokens):
            logprob = update.logprobs[place] if update.logprobs else None
            text = self._stream.add(token)
            shown, has_ended = self.stops.add(text)
            special, drafted = self.specials.get(token), place < update.accepted
            is_special, text = special is not None, special or text
            self.pieces.append(Piece(token, text, shown, logprob, is_special, drafted, update.round))
            if has_ended:
                self.finish = STOP
                break
        if update.round > 0:
            self.counts.add_round(update.drafted, update.accepted, len(self.pieces) - n_before)
        if self.finish is None and update.finish is not None:
            self.finish = REASONS.get(update.finish, "error")
            if self.pieces:  # what waited for more is shown
                rest, last = self._stream.rest(), self.pieces[-1]
                shown, has_ended = self.stops.add(rest)
                last.shown += shown + ("" if has_ended else self.stops.rest())
                last.text += "" if last.special else rest
                if has_ended and update.finish in REASONS:
                    self.finish = STOP
            if update.request.error is not None:
                self.failure = Failure(424, "generation", update.request.error)
        self.changed(update.seen)

    def end(self, finish: str, failure: Failure | None = None) -> None:
        """End it from outside; one that has ended stays as it is."""
        if self.finish is None:
            self.finish, self.failure = finish, failure
            self.changed(time.perf_counter())

    def changed(self, now: float) -> None:
        self.ended = now if self.finish else None
        self._changed.set()

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """The tokens of each step, until it ends. Raises its failure."""
        n_sent = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while n_sent < len(self.pieces):  # more may have come while the last ones were written
                new, n_sent = self.pieces[n_sent:], len(self.pieces)
                yield new
            if self.failure is not None:
                raise self.failure
            if self.finish is not None:
                return

    async def wait(self) -> None:
        """Until it has ended. Raises its failure."""
        async for _ in self.batches():
            pass

    def report(self) -> dict[str, Any]:
        """What answers say of how it was made: `seed`, `timings` as of llama.cpp's server, in ms, and `speculation`."""
        counts, now = self.counts, time.perf_counter()
        started, ended = self.request.started or now, self.ended or now
        first = self.first or ended
        n_prompt, n_new = len(self.request.prompt), len(self.pieces)
        timings = {
            "prompt_n": n_prompt - self.request.n_reused,
            "cache_n": self.request.n_reused,
            "prompt_ms": ms(first - started),
            "predicted_n": n_new,
            "predicted_ms": ms(ended - first),
            "draft_n": counts.drafted,
            "draft_n_accepted": counts.accepted,
        }
        speculation = rounded({name: getattr(counts, name) for name in SPECULATION})
        return {"seed": self.request.sampling.seed, "timings": timings, "speculation": speculation}

    def log(self) -> dict[str, Any]:
        """For the log line of its request, without any text."""
        started, first = self.request.started or self.ended or self.received, self.first
        return {
            "finish": self.finish,
            "prompt_tokens": len(self.request.prompt),
            "new_tokens": len(self.pieces),
            "reused": self.request.n_reused,
            "queue_ms": ms(started - self.received),
            "ttft_ms": None if first is None else ms(first - self.received),
            "drafted": self.counts.drafted,
            "accepted": self.counts.accepted,
        }


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
