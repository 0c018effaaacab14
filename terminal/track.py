"""Collects the tokens of a pass row by row: text, origin, and time."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.requests import Outcome, Progress, Request
from models.checkpoints.text_stream import TextStream
from models.checkpoints.tokenizer import Tokenizer

# Seconds between two drawings.
DRAW_EVERY = 0.08
CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "") | {ord("\n"): "\n", ord("\t"): "    "}


def printable(text: str) -> str:
    """Return a text without control characters, which move a terminal's cursor, and with spaces for tabs."""
    return text.translate(CONTROLS)


class Token(NamedTuple):
    """A token of a row. round: from 1, or 0 for the prefill. seconds: sum of the pass's rounds up to this token."""

    text: str
    drafted: bool
    round: int
    seconds: float


class Track(Progress):
    """Collects the tokens of a pass between its rounds, and calls `draw` every DRAW_EVERY seconds.

    inner: another `Progress` to notify. seconds: sum of all rounds so far. rejected: for each row, the text of the
    draft tokens that its last round rejected.
    """

    def __init__(
        self, inner: Progress, tokenizer: Tokenizer, n_rows: int, draw: Callable[[], object] | None = None
    ) -> None:
        self.rows: list[list[Token]] = [[] for _ in range(n_rows)]
        self.rejected, self.seconds = [""] * n_rows, 0.0
        self._inner, self._tokenizer, self._draw = inner, tokenizer, draw
        self._streams = [TextStream(tokenizer) for _ in self.rows]
        self._news: list[tuple[Request, Sequence[int], int, int]] = []
        self._since = self._drawn = time.perf_counter()

    def prefilled(self, n_tokens: int) -> None:
        self._inner.prefilled(n_tokens)
        self._since = time.perf_counter()

    def decoded(self, request: Request, outcome: Outcome, n_kept: int) -> None:
        self._inner.decoded(request, outcome, n_kept)
        accepted = len(outcome.block) - 1
        self._news.append((request, outcome.drafts[accepted:], accepted, n_kept))

    def finished(self, request: Request) -> None:
        self._inner.finished(request)
        if not self._news:  # the prefill's token was the last
            self._take(request, (), 0, 0)

    def emitted(self, n_tokens: int) -> None:
        self._inner.emitted(n_tokens)
        now = time.perf_counter()
        if self._news:  # else a prefill emitted it
            self.seconds += now - self._since
        for news in self._news:
            self._take(*news)
        self._news.clear()
        if self._draw and now - self._drawn >= DRAW_EVERY:
            self._drawn = now
            self._draw()
        self._since = time.perf_counter()

    def _take(self, request: Request, rejected: Sequence[int], accepted: int, n_kept: int) -> None:
        row, stream, tokens = self.rows[request.index], self._streams[request.index], request.tokens
        self.rejected[request.index] = printable(self._tokenizer.decode(rejected))
        first, number = len(tokens) - n_kept, row[-1].round + 1 if row else 1
        for index in range(len(row), len(tokens)):
            text = stream.add(tokens[index])
            if request.finish_reason and index == len(tokens) - 1:
                text += stream.rest()
            is_drafted, round_ = first <= index < first + accepted, number if index >= first else 0
            row.append(Token(printable(text), is_drafted, round_, self.seconds))
