"""The columns of tables.toml, what they show of a record, and tables with a column for each value of a field."""

import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import bench
from common.checkout import ROOT
from common.tables import Column
from engine.stats import acceptance_text, with_error
from reproduce.helpers import published
from reproduce.helpers.records import Record, grouped

SPECIFICATIONS = tomllib.loads((ROOT / "reproduce" / "tables.toml").read_text(encoding="utf-8"))
PIVOT = "*"  # stands for the columns of a pivot among the names of columns


def over(numerator: str, denominator: str) -> Callable[[Record], float | None]:
    """Return a function that divides two fields of a record; it returns None where a field was not measured."""
    return lambda record: bench.ratio(record.get(numerator), record.get(denominator))


def first_of(names: Sequence[str], record: Record) -> object:
    """Return the first of these fields that is set."""
    return next((record[name] for name in names if record.get(name)), None)


def drafter_text(record: Record) -> str | None:
    """Return a drafter's name without the folders of checkpoints; of a benchmark, the draft or the policy of self."""
    policy = ("draft_policy",) if record.get("draft") in (None, "self") else ()
    name = first_of(("drafter", *policy, "draft"), record)
    return None if name is None else re.sub(r":[^@=+]*/[^@=+]*", "", str(name))


def paired_text(record: Record) -> str | None:
    """Return the acceptance, with = after it if no difference from what it is compared with is shown."""
    text, difference = acceptance_text(record), record.get("difference")
    return f"{text} =" if text and difference and difference.low <= 0 <= difference.high else text


def mark_loss(value: float) -> str:
    """Mark with * what is slower than plain decoding."""
    return f"{value:.2f}" + ("*" if value < 1 else "")


def marked_speedup(record: Record) -> str | None:
    """Return the speedup with its standard error, marked with * if plain decoding is faster."""
    text = bench.speedup_text(record)
    return text and text + "*" * (record["speedup"] < 1)


def identical_text(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']:.0f}"


def gain_text(record: Record, speedup: str = "speedup", more: str = "mean_accepted_length") -> str | None:
    """Return a speedup, and what stands after it."""
    if None in (record.get(speedup), record.get(more)):
        return None
    return f"{mark_loss(record[speedup])} ({record[more]:.2f})"


def prediction_text(fact: Record) -> str:
    """Return the published and the predicted number. ?: the acceptance is assumed. *: plain decoding is faster."""
    value, is_ratio = published.predict(fact), "kind" in fact
    texts = [f"{x:.2f}" if is_ratio else mark_loss(x) for x in (fact["value"], value)]
    return " / ".join(texts) + ("" if is_ratio or published.is_acceptance_known(fact) else "?")


def published_text(facts: Callable[[], Sequence[Record]], record: Record) -> str | None:
    """Return the published number of the same models and setting as a record's."""
    fact = published.find_fact(facts(), record)
    return None if fact is None else f"{fact['value']:.2f}"


def ratio_name(fact: Record) -> str:
    return f"verification, gamma {fact['gamma']}" if fact["gamma"] else f"draft step, budget {fact['draft_budget']}"


NAMED = (acceptance_text, bench.reads_text, drafter_text, paired_text, identical_text, prediction_text, ratio_name)
VALUES: dict[str, Callable[[Record], object]] = {
    **{each.__name__: each for each in (*NAMED, marked_speedup, published.target_name, published.draft_name)},
    # The budget, or `all` of a cache without one.
    "entries_text": lambda row: row.get("draft_budget") or ("all" if row.get("draft_entries_share") else None),
    "interval_text": lambda row: row.get("difference") and "{1:+.3f} to {2:+.3f}".format(*row["difference"]),
    "speedup_with_error": bench.speedup_text,
    "score_with_error": lambda record: with_error(record.get("score"), record.get("score_standard_error"), 2),
    "speedup_and_length": gain_text,
    "wall_speedup_and_acceptance": partial(gain_text, speedup="wall_speedup", more="acceptance_rate"),
    "published_speedup": partial(published_text, published.published_speedups),
    "published_acceptance": partial(published_text, published.published_rates),
}


def column(name: str) -> Column:
    """Return the column of a name as tables.toml specifies it, or else the field of that name."""
    given: dict[str, Any] = SPECIFICATIONS["columns"].get(name, {})
    key: str | Callable[[Any], object] = name
    if "value" in given:
        key = VALUES[given["value"]]
    elif "template" in given:
        key = given["template"].format_map
    elif "over" in given:
        key = over(*given["over"])
    elif "either" in given:
        key = partial(first_of, given["either"])
    text, align = given.get("format", ""), "<" if given.get("text") else ">"
    format_ = mark_loss if text == "speedup" else text
    return Column(key, given.get("head", name), format_, given.get("missing", "-"), align)


def of(names: str) -> list[Column]:
    """Return the columns of names that spaces separate."""
    return [column(name) for name in names.split()]


def shown(columns: Sequence[Column], rows: Sequence[Record]) -> list[Column]:
    """Return the columns in which something stands, if only a word for what is missing."""
    return [column for column in columns if {column.cell(row) for row in rows} != {Column.missing}]


def ranked(rows: Sequence[Record], names: str) -> list[Record]:
    """Return rows in the order of these columns: what a row lacks before numbers, and numbers before words."""

    def rank(row: Record) -> list[tuple]:
        values = (column.value(row) for column in of(names))
        return [(value is not None, isinstance(value, str), value) for value in values]

    return sorted(rows, key=rank)


def medians(rows: Sequence[Record], names: str) -> list[Record]:
    """Return a row for each combination of what these columns show, with the medians of all numbers of its rows."""
    columns, found = of(names), []
    for group in grouped(rows, lambda row: tuple(column.cell(row) for column in columns)).values():
        values = {name: [row.get(name) for row in group] for name in group[0]}
        numbers = {name for name, each in values.items() if {*map(type, each)} <= {int, float}}
        found.append(group[-1] | {name: median(values[name]) for name in numbers})
    return found


def pivot(rows: Sequence[Record], names: str, by: str, cell: str) -> tuple[list[Record], list[Column]]:
    """Return the lines and columns of a table that has, in the place of PIVOT among `names`, a column for each value of
    the column `by`: it shows `cell` of the last such row. A line is a combination of what the columns before show."""
    index, _, after = names.partition(PIVOT)
    before, inner, key = of(index), column(cell), column(by)

    lines = [
        group[0] | {"cells": {key.value(row): inner.cell(row) for row in group}}
        for group in grouped(rows, lambda row: tuple(column.cell(row) for column in before)).values()
    ]
    values = [key.value(row) for row in ranked([*{key.value(row): row for row in rows}.values()], by)]
    heads = [value if isinstance(value, str) else f"{key.head} {value}" for value in values]
    cells = (lambda line, value=value: line["cells"].get(value) for value in values)
    return lines, [*before, *map(Column, cells, heads), *of(after)]
