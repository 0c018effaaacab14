"""Tables for the console or in Markdown, from the same description of their columns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A column of a table.

    key: a key of each row, or a function of it. format: the specification for `format()`, or a function of the value.
    missing: stands for None. align: "<" for texts, ">" for numbers.
    """

    key: str | Callable[[Any], object]
    head: str
    format: str | Callable[[Any], str] = ""
    missing: str = "-"
    align: str = ">"

    def value(self, row: Any) -> Any:
        return self.key(row) if callable(self.key) else row.get(self.key)

    def cell(self, row: Any) -> str:
        value = self.value(row)
        if value is None:
            return self.missing
        return self.format(value) if callable(self.format) else format(value, self.format)


def console(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    """Return a line of heads and a line for each row, indented, in columns that are as wide as their longest cell."""
    lines = _lines(rows, columns)
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    drawn = (
        "  ".join(f"{cell:{column.align}{width}}" for cell, column, width in zip(line, columns, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"  {line}".rstrip() for line in drawn)


def markdown(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    """Return a table in GitHub's Markdown."""
    head, *lines = ([cell.replace("|", r"\|") for cell in line] for line in _lines(rows, columns))
    rule = ["---:" if column.align == ">" else "---" for column in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def _lines(rows: Iterable[Any], columns: Sequence[Column]) -> list[list[str]]:
    return [[column.head for column in columns], *([column.cell(row) for column in columns] for row in rows)]
