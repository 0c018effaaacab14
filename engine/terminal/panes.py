"""Two passes side by side in a terminal: the first as it runs, and once more, at its own pace, beside the second."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from operator import attrgetter

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from engine.bench.progress import bar_of_pass
from engine.bench.session import Session
from engine.requests import Progress
from engine.terminal.track import Token, Track

# Of a row, with the line that names it; where there is less room, fewer rows are shown.
LEAST_ROW_LINES = 5
PLAIN, DRAFTED, OWN, REJECTED, DIM = map(Style.parse, ("none", "green", "bold", "dim strike", "dim"))
# The passes, in their order.
TITLES = {"baseline": "plain decoding", "speculation": "speculation"}
LEGEND = (("accepted draft", DRAFTED), ("the target's own", OWN), ("rejected in the last round", REJECTED))
BETWEEN = Segment(" │ ", DIM)

Line = list[Segment]


def add_text(lines: list[Line], text: str, style: Style, width: int) -> None:
    """Go on with styled text, wrapped at spaces: lines above the last one stay as they are."""
    for number, part in enumerate(text.split("\n")):
        if number:
            lines.append([])
        if not part:
            continue
        line = lines[-1]
        line.append(Segment(part, style))
        if len(line) > 1 and sum(segment.cell_length for segment in line) > width:
            # The word that does not fit, of which other tokens may have begun.
            begin = next((i for i in range(len(line) - 1, 0, -1) if line[i].text.startswith(" ")), len(line) - 1)
            lines[-1], (first, *others) = line[:begin], line[begin:]
            lines.append([Segment(first.text.lstrip(" "), first.style), *others])


class Column:
    """A pass's rows as far as they had come at a time, in lines; of one that is still to come, empty ones."""

    def __init__(self, name: str, track: Track | None, n_rows: int, width: int) -> None:
        self.name, self._width, self._track = name, width, track
        self._rows: list[list[Token]] = track.rows if track else [[]] * n_rows
        self._lines: list[list[Line]] = [[[]] for _ in self._rows]
        self._n_shown = [0] * n_rows

    def advance(self, seconds: float) -> None:
        for index, row in enumerate(self._rows):
            end = bisect_right(row, seconds, key=attrgetter("seconds"))
            for token in row[self._n_shown[index] : end]:
                style = PLAIN if self.name == "baseline" else DRAFTED if token.drafted else OWN
                add_text(self._lines[index], token.text, style, self._width)
            self._n_shown[index] = end

    def head(self, seconds: float) -> list[Line]:
        """What it is, and how fast it has been."""
        n_decoded = sum(max(n - 1, 0) for n in self._n_shown)  # all but each row's first, which prefilling gave
        if not n_decoded:
            return [[Segment(TITLES[self.name], OWN)], [Segment("comes next", DIM)]]
        seconds = min(seconds, max(row[-1].seconds for row in self._rows if row))
        speed = f"{n_decoded} tokens, {n_decoded / seconds:.1f} tokens/s"
        return [[Segment(TITLES[self.name], OWN)], [Segment(speed, DIM)]]

    def tail(self, index: int, n_lines: int, is_running: bool) -> list[Line]:
        """A row's last lines, and while it is decoded which of its last drafts were rejected."""
        lines = self._lines[index][-n_lines:]
        if is_running and self._track and self.name == "speculation":
            lines[-1] = [*lines[-1], Segment(self._track.rejected[index].replace("\n", " "), REJECTED)]
        return lines


class Panes:
    """What a terminal shows of two passes, whose rows have `names`; where there is none, their progress bars.

    tracks: what they emitted.
    """

    def __init__(self, names: Sequence[str], console: Console) -> None:
        self.tracks: dict[str, Track] = {}
        self._names, self._console, self._columns, self._width = names, console, list[Column](), 0

    @contextmanager
    def watch(self, session: Session, name: str) -> Iterator[Progress]:
        """A pass, while it runs."""
        assert session.tokenizer is not None
        draws, n_rows = self._console.is_terminal, len(self._names)
        live = Live(self, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        with bar_of_pass(session, name, shown=not draws) as bar:
            track = self.tracks[name] = Track(bar, session.tokenizer, n_rows, live.refresh if draws else None)
            self._width = 0  # the columns are to show another pass
            with live if draws else nullcontext():
                yield track

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from self.segments(console.width, console.height - 1)

    def segments(self, width: int, height: int, is_running: bool = True) -> Iterator[Segment]:
        """At most so many lines; once nothing runs, no more than there are."""
        half, n_rows = (width - cell_len(BETWEEN.text)) // 2, len(self._names)
        if width != self._width:
            self._width = width
            self._columns = [Column(name, self.tracks.get(name), n_rows, half) for name in TITLES]
        seconds = [*self.tracks.values()][-1].seconds if is_running else math.inf
        for column in self._columns:
            column.advance(seconds)
        n_shown = max(1, min(n_rows, (height - 3) // LEAST_ROW_LINES))
        n_lines = max(1, (height - 3) // n_shown - 1)  # beside the line that names the row
        heads = (column.head(seconds)[: 2 if is_running else 1] for column in self._columns)
        yield from _beside(half, *heads)
        for index, name in enumerate(self._names[:n_shown]):
            yield from _line(width, Segment(f"row {index}: {name}".replace("\n", " "), DIM))
            tails = (column.tail(index, n_lines, is_running) for column in self._columns)
            yield from _beside(half, *tails, [[]] * (n_lines if is_running else 0))
        more = f"and {n_rows - n_shown} more rows" if n_shown < n_rows else ""
        yield from _line(
            width,
            *(Segment(f"{name}   ", style) for name, style in LEGEND[: None if is_running else 2]),
            Segment(more, DIM),
        )


def _beside(width: int, *columns: Sequence[Line]) -> Iterator[Segment]:
    """Lines of two columns; a third one only makes them more."""
    for left, right, *_ in zip_longest(*columns, fillvalue=list[Segment]()):
        yield from Segment.adjust_line_length(left, width)
        yield BETWEEN
        yield from _line(width, *right)


def _line(width: int, *segments: Segment) -> Iterator[Segment]:
    yield from Segment.adjust_line_length([*segments], width, pad=False)
    yield Segment.line()
