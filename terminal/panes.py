"""Displays two passes side by side: the first while it runs, then again, at its pace, next to the second."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from bench.progress import bar_of_pass
from bench.session import Session
from engine.requests import Outcome, Progress, Request
from models.checkpoints.text_stream import TextStream
from models.checkpoints.tokenizer import Tokenizer

# The fewest lines of a row, its name included; a small terminal displays fewer rows.
LEAST_ROW_LINES = 5
PLAIN, DRAFTED, TARGET, REJECTED, DIM = "none", "green", "bold", "dim strike", "dim"
# The passes, in their order.
TITLES = {"baseline": "plain decoding", "speculation": "speculation"}
LEGEND = (("accepted draft", DRAFTED), ("target's token", TARGET), ("rejected in the last round", REJECTED))
BETWEEN = Text(" │ ", DIM)
# Seconds between two drawings.
DRAW_EVERY = 0.08
CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "") | {ord("\n"): "\n", ord("\t"): "    "}


def printable(text: str) -> str:
    """Return a text without control characters, which move a terminal's cursor, and with spaces for tabs."""
    return text.translate(CONTROLS)


class Token(NamedTuple):
    """A token of a row. drafted: True for an accepted draft token. seconds: sum of the pass's rounds up to it."""

    text: str
    drafted: bool
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
        first = len(tokens) - n_kept
        for index in range(len(row), len(tokens)):
            text = stream.add(tokens[index])
            if request.finish_reason and index == len(tokens) - 1:
                text += stream.rest()
            row.append(Token(printable(text), first <= index < first + accepted, self.seconds))


def wrapped(tokens: Sequence[Token], name: str, width: int, console: Console) -> list[Text]:
    """Return the lines of a row of a pass, wrapped at spaces rather than at the ends of tokens."""
    styles = (PLAIN if name == "baseline" else DRAFTED if token.drafted else TARGET for token in tokens)
    text = Text.assemble(*((token.text, style) for token, style in zip(tokens, styles, strict=True)))
    return [*text.wrap(console, width)]


class Panes:
    """Displays two passes, or, without a terminal, their progress bars.

    names: names of the rows. tracks: the tokens of each pass, by its name.
    """

    def __init__(self, names: Sequence[str], console: Console) -> None:
        self.tracks: dict[str, Track] = {}
        self._names, self._console = names, console

    @contextmanager
    def watch(self, session: Session, name: str) -> Iterator[Progress]:
        """Display a pass while it runs."""
        assert session.tokenizer is not None
        live = Live(self, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        with bar_of_pass(session, name, visible=not self._console.is_terminal) as bar:
            track = self.tracks[name] = Track(bar, session.tokenizer, len(self._names), live.refresh)
            with live:  # draws nothing without a terminal
                yield track

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Group]:
        yield self.frame(console.width, console.height - 1)

    def frame(self, width: int, height: int, is_running: bool = True) -> Group:
        """Return both columns in at most `height` lines."""
        half, n_rows = (width - BETWEEN.cell_len) // 2, len(self._names)
        seconds = [*self.tracks.values()][-1].seconds if is_running else math.inf
        passes = {name: self._until(name, seconds) for name in TITLES}
        n_visible = max(1, min(n_rows, (height - 3) // LEAST_ROW_LINES))
        n_lines = max(1, (height - 3) // n_visible - 1)  # next to the line that names the row
        heads = ([Text(TITLES[name], TARGET), self._speed(name, rows, seconds)] for name, rows in passes.items())
        parts: list[Table | Text] = [_beside(half, *(head[: 2 if is_running else 1] for head in heads))]
        for index, name in enumerate(self._names[:n_visible]):
            parts.append(Text(f"row {index}: {name}".replace("\n", " "), DIM, no_wrap=True, overflow="crop"))
            tails = [wrapped(rows[index], title, half, self._console)[-n_lines:] for title, rows in passes.items()]
            if is_running and (track := self.tracks.get("speculation")):
                rejected = track.rejected[index].replace("\n", " ")
                tails[1] = [*tails[1][:-1], (tails[1] or [Text()])[-1] + Text(rejected, REJECTED)]
            parts.append(_beside(half, *tails, [Text()] * n_lines * is_running))
        more = f"and {n_rows - n_visible} more rows" if n_visible < n_rows else ""
        legend = ((f"{name}   ", style) for name, style in LEGEND[: None if is_running else 2])
        return Group(*parts, Text.assemble(*legend, (more, DIM), no_wrap=True, overflow="crop"))

    def _until(self, name: str, seconds: float) -> list[list[Token]]:
        """Return the rows of a pass up to a time, or empty rows before it has begun."""
        rows = self.tracks[name].rows if name in self.tracks else [list[Token]()] * len(self._names)
        return [row[: bisect_right(row, seconds, key=attrgetter("seconds"))] for row in rows]

    def _speed(self, name: str, rows: Sequence[Sequence[Token]], seconds: float) -> Text:
        """Return the tokens per second of a pass, without the first token of each row, which the prefill emits."""
        n_decoded = sum(max(len(row) - 1, 0) for row in rows)
        if not n_decoded:
            return Text("comes next", DIM)
        seconds = min(seconds, max(row[-1].seconds for row in self.tracks[name].rows if row))
        return Text(f"{n_decoded} tokens, {n_decoded / seconds:.1f} tokens/s", DIM)


def _beside(width: int, *columns: Sequence[Text]) -> Table:
    """Return lines of two columns, as many as the longest of `columns` has; a third column is not drawn."""
    half = Column(width=width, no_wrap=True, overflow="crop")
    grid = Table.grid(half, Column(width=BETWEEN.cell_len, no_wrap=True), half.copy())
    for left, right, *_ in zip_longest(*columns, fillvalue=Text()):
        grid.add_row(left, BETWEEN, right)
    return grid
