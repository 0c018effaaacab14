"""What a pass emitted, row by row: each token's text, where it came from, and when."""

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
    """With spaces for tabs, and no other control characters: no model is to move a terminal's cursor."""
    return text.translate(CONTROLS)


class Token(NamedTuple):
    """round: of its row, from 1; 0 for the one that prefilling gave. seconds: of the pass's rounds until then."""

    text: str
    drafted: bool
    round: int
    seconds: float


class Track(Progress):
    """Follows a pass, whose rounds it leaves alone: what they emitted is looked at, and drawn, between them. inner: is
    notified of the same. seconds: of the rounds so far. rejected: of each row, the text of those drafts of the last
    round that were not accepted."""

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
        if not self._news:  # its first token ended it
            self._take(request, (), 0, 0)

    def emitted(self, n_tokens: int) -> None:
        self._inner.emitted(n_tokens)
        now = time.perf_counter()
        if self._news:  # else it is a prompt's first token, which no round emitted
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
        for place in range(len(row), len(tokens)):
            text = stream.add(tokens[place])
            if request.finish_reason and place == len(tokens) - 1:
                text += stream.rest()
            is_drafted, of_round = first <= place < first + accepted, number if place >= first else 0
            row.append(Token(printable(text), is_drafted, of_round, self.seconds))
