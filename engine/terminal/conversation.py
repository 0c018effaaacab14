"""A conversation: each answer is decoded behind all that was said before, and written as it grows."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from rich.console import Console

from common.errors import ConfigError, flag, require_at_least
from engine.bench.config import RunConfig, Sizes
from engine.bench.plan import resolve, with_draft
from engine.bench.session import Session
from engine.decoding import Decoder
from engine.requests import Request
from engine.runner import not_finite
from engine.stats import RoundStats
from engine.terminal.texts import chat_prompt, printable, text_target
from models.checkpoints.text_stream import TextStream

RESET, EXIT = "/reset", "/exit"


class Conversation:
    """system: what it begins with. gen_len: the most new tokens of an answer."""

    def __init__(self, session: Session, system: str | None, gen_len: int, colour_drafts: bool) -> None:
        self._session, self._gen_len, self._style = session, gen_len, "cyan" if colour_drafts else None
        self._decoder = Decoder(session.runner, drafter=session.drafter(), verification=session.sampling.mode)
        self._begin = [{"role": "system", "content": system}] if system else []
        self._messages, self._console = self._begin, Console(highlight=False)

    @classmethod
    def open(
        cls, config: RunConfig, system: str | None, gen_len: int, context: int, colour_drafts: bool
    ) -> Conversation:
        """Load the models, with room for a conversation of `context` tokens. Errors: UserError."""
        require_at_least("gen_len", gen_len, 1)
        source = text_target(config)
        chat_prompt(source, source.tokenizer(), [{"role": "user", "content": "?"}])  # refused now, without a template
        plan = resolve(replace(config, sizes=Sizes(B=1, gen_len=1)), [[0]])
        assert plan.draft is not None
        if plan.draft.automatic or plan.draft.config.needs_baseline:
            what, where = "an answer has nothing to choose by, and no plain decoding before it", flag("draft")
            seen, required = f"{plan.draft.kind} that chooses, or needs it", "one gamma, one budget, and no oracle"
            raise ConfigError(what, where, seen, required, f"use {where} self and a number for {flag('gamma')}")
        room = min(context, source.config.max_context)
        require_at_least("context", room, plan.gamma + 3)
        plan = with_draft(replace(plan, prefix_len=room - plan.gamma - 2), plan.config.draft)
        return cls(Session.of_plan(replace(plan, capacity=plan.length)), system, gen_len, colour_drafts)

    def run(self) -> None:
        """Answer what is typed, or each line of what is piped. Errors: UserError if logits are not finite."""
        for message in _messages():
            if message == EXIT:
                return
            if message == RESET:
                self._messages = self._begin
            elif message:
                print(f"  {self._answer(message)}", file=sys.stderr, flush=True)

    def _answer(self, message: str) -> str:
        """Write the answer as it grows; returns what there is to say of it."""
        session, said = self._session, [*self._messages, {"role": "user", "content": message}]
        assert session.tokenizer is not None
        prompt = chat_prompt(session.target, session.tokenizer, said)
        room = session.plan.capacity - len(prompt) - session.plan.gamma - 1
        if room < 1:
            return f"no room for that in a conversation of {session.plan.capacity} tokens; {RESET} begins another"
        limit, stop_tokens = min(self._gen_len, room), session.target.config.eos_tokens
        request = Request(prompt, limit, stop_tokens, session.sampling.params, id=len(said))
        stream, rounds, text = TextStream(session.tokenizer), list[RoundStats](), ""
        self._decoder.submit(request)
        with _interrupts() as interrupts:
            while True:
                shown, accepted, stats = len(request.tokens), request.counts.accepted, self._decoder.step()
                first = len(request.tokens) - (stats.emitted if stats else 0)
                drafted = range(first, first + request.counts.accepted - accepted)
                for place, token in enumerate(request.tokens[shown:], shown):
                    text += self._write(stream.add(token), self._style if place in drafted else None)
                if stats is None or interrupts:
                    break
                rounds.append(stats)
        self._decoder.cancel(request)
        text += self._write(stream.rest())
        print(flush=True)
        if request.error:
            raise not_finite("the answer", request.error)
        self._messages = [*said, {"role": "assistant", "content": text}]
        return _figures(request, rounds)

    def _write(self, piece: str, style: str | None = None) -> str:
        self._console.out(printable(piece), end="", style=style)
        return piece


def _figures(request: Request, rounds: Sequence[RoundStats]) -> str:
    counts, ended = request.counts, {"length": f", cut at {request.limit} tokens", "cancelled": ", cancelled"}
    why = ended.get(str(request.finish_reason), "")
    if counts.acceptance_rate is None or counts.mean_accepted_length is None:
        return f"nothing was drafted{why}"
    ms = 1e3 * sum(one.seconds for one in rounds) / counts.emitted
    return (
        f"acceptance rate {counts.acceptance_rate:.3f}, {counts.mean_accepted_length:.2f} tokens per round, "
        f"{ms:.1f} ms per token{why}"
    )


def _messages() -> Iterator[str]:
    """What is typed until Ctrl-D, or the lines of what is piped."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # what is typed can be edited
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"  {EXIT} or Ctrl-D ends", file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C, which is only noted meanwhile: a round is never left half done."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
