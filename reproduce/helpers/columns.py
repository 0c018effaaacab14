"""Columns of tables of records by the name of the field, and tables with a column for each value of a field."""

from collections.abc import Callable, Sequence

import bench
from common.tables import Column
from engine.counts import acceptance_text
from reproduce.helpers.records import Record, grouped

NONE = "not measured"
TEXT = {"align": "<"}


def over(numerator: str, denominator: str) -> Callable[[Record], float | None]:
    """Return a function that divides two fields of a record; it returns None where a field was not measured."""
    return lambda record: bench.ratio(record.get(numerator), record.get(denominator))


def speedup_text(value: float) -> str:
    """Mark with * what is slower than plain decoding."""
    return f"{value:.2f}" + ("*" if value < 1 else "")


def identical_text(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']:.0f}"


def weights_of(record: Record) -> str | None:
    return record.get("draft_weights") or record.get("draft_dtype")


COLUMNS = {
    "prefix_len": Column("prefix_len", "context"),
    "B": Column("B", "rows"),
    "gamma": Column("gamma", "gamma"),
    "temperature": Column("temperature", "temperature"),
    "draft_policy": Column("draft_policy", "policy", **TEXT),
    "draft_budget": Column("draft_budget", "budget", missing="all"),
    "draft_weights": Column(weights_of, "draft weights", **TEXT),
    "drafter": Column("drafter", "drafter", **TEXT),
    "category": Column("category", "category", **TEXT),
    "text": Column("text", "text", **TEXT),
    "sampling": Column("sampling", "sampling", **TEXT),
    "storage": Column("storage", "weights and entries", **TEXT),
    "sequences": Column("sequences", "prompts"),
    "acceptance": Column(acceptance_text, "acceptance"),
    "verified": Column("verified", "verified positions"),
    "mean_accepted_length": Column("mean_accepted_length", "mean accepted length", ".2f"),
    "distinct_4grams": Column("distinct_4gram_fraction", "distinct 4-grams", ".2f"),
    "identical": Column(identical_text, "identical rows"),
    "speedup": Column("speedup", "speedup", speedup_text),
    "wall_speedup": Column("wall_speedup", "to the last row", speedup_text),
    "plain_ms": Column("baseline_step_ms", "plain step, ms", ".1f"),
    "verify_ratio": Column(over("verify_step_ms", "baseline_step_ms"), "verification / plain", ".2f"),
    "draft_ratio": Column(over("draft_step_ms", "baseline_step_ms"), "draft step / plain", ".2f"),
    "drafting_ratio": Column(over("drafting_ms", "baseline_step_ms"), "drafting / plain step", ".2f"),
    "plain_rate": Column("baseline_tokens_per_second", "plain, tokens/s", ".1f"),
    "rate": Column("decode_tokens_per_second", "speculation, tokens/s", ".1f"),
}


def of(names: str) -> list[Column]:
    """Return the columns of names that spaces separate."""
    return [COLUMNS[name] for name in names.split()]


def pivot(rows: Sequence[Record], index: Sequence[Column], key: str, cell: Column) -> tuple[list[Record], list[Column]]:
    """Return a table with a column for each value of `key`, in order, which shows `cell` of the last such row, and a
    line for each combination of what the `index` columns show."""

    def show(value: object) -> Callable[[Record], str | None]:
        return lambda line: line["cells"].get(value)

    lines = [
        group[0] | {"cells": {row[key]: cell.cell(row) for row in group}}
        for group in grouped(rows, lambda row: tuple(column.cell(row) for column in index)).values()
    ]
    values = sorted({row[key] for row in rows})
    heads = [value if isinstance(value, str) else f"{COLUMNS[key].head} {value}" for value in values]
    return lines, [*index, *(Column(show(value), head) for value, head in zip(values, heads, strict=True))]
