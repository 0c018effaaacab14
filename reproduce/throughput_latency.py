"""Throughput against latency of plain decoding and of speculation, from few rows at a time to many.

    python reproduce/throughput_latency.py
    python reproduce/throughput_latency.py --model CHECKPOINT --B 1 4 16 64 --prefix_len 16000 --compile

Runs the cells of speedup_tables.py: what one of them has measured the other does not measure again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from reproduce.paper import reproduction
from reproduce.paper.figures import BLACK, CATEGORIES, MARKERS, Figure, Panel, Series
from reproduce.paper.published import published
from reproduce.paper.reproduction import Record, Sizes, number, quotient, side_by_side

NAME = "throughput_latency"
SIZES = Sizes()
HEAD = ["target", "draft", "context", "rows", "gamma", "budget"]
HEAD += ["plain ms/token", "plain tokens/s", "ms/token", "tokens/s"]


@dataclass(frozen=True)
class Point:
    """Milliseconds that a row waits for a token, and tokens per second of all rows together."""

    ms_per_token: float
    tokens_per_second: float


def plain_point(record: Record) -> Point | None:
    return _point(record.get("baseline_step_ms"), record.get("baseline_tokens_per_second"))


def speculative_point(record: Record) -> Point | None:
    """A round over the tokens that a row gets of it; None with random weights, which accept what they do by chance."""
    return _point(quotient(record, "round_ms", "mean_accepted_length"), record.get("decode_tokens_per_second"))


def _point(ms: float | None, tokens: float | None) -> Point | None:
    return None if ms is None or tokens is None else Point(ms, tokens)


def table(records: list[Record]) -> str:
    found = []
    for record in records:
        who = reproduction.target_name(record), reproduction.draft_name(record)
        place = [*who, *(str(record[key]) for key in ("prefix_len", "B", "gamma", "draft_budget"))]
        shown = [*_texts(plain_point(record)), *_texts(speculative_point(record))]
        found.append(((*who, record["prefix_len"], record["B"]), [*place, *shown]))
    lines = [line for _, line in sorted(found, key=lambda pair: pair[0])]
    return (
        "  Throughput against latency\n\n"
        f"{reproduction.differences(records)}\n"
        "  Published: a figure; no numbers of it are recorded here, so there is nothing to set beside these.\n"
        "  ms/token: what a row waits for a token; tokens/s: all rows together, while all are busy.\n\n"
        + side_by_side(HEAD, lines)
    )


def _texts(point: Point | None) -> list[str]:
    return [number(point.ms_per_token if point else None, 1), number(point.tokens_per_second if point else None, 1)]


def figure(records: list[Record]) -> Figure:
    """A panel for each target and context; points are named by their rows."""
    places = sorted({(reproduction.target_name(record), record["prefix_len"]) for record in records})
    panels = []
    for target, context in places:
        own = [
            record
            for record in records
            if (reproduction.target_name(record), record["prefix_len"]) == (target, context)
        ]
        own.sort(key=lambda record: record["B"])
        ways = dict.fromkeys((reproduction.draft_name(r), r["gamma"], r["draft_budget"]) for r in own)
        by_rows = {record["B"]: record for record in reversed(own)}
        series = [_series("plain decoding", [by_rows[rows] for rows in sorted(by_rows)], plain_point, BLACK, "v")]
        for place, way in enumerate(ways):
            kept = [r for r in own if (reproduction.draft_name(r), r["gamma"], r["draft_budget"]) == way]
            label = f"{way[0]} drafts, gamma {way[1]}, budget {way[2]}"
            colour, marker = CATEGORIES[place % len(CATEGORIES)], MARKERS[place % len(MARKERS)]
            series.append(_series(label, kept, speculative_point, colour, marker))
        title = f"{target}, {context} tokens"
        panels.append(Panel(title, "ms per token of a row", "tokens per second of all rows", tuple(series), False))
    empty = Panel("nothing measured", "ms per token of a row", "tokens per second of all rows", (), False)
    return Figure(
        f"Throughput against latency ({published().system}: no published numbers recorded)", tuple(panels) or (empty,)
    )


def _series(
    label: str, records: list[Record], point_of: Callable[[Record], Point | None], colour: str, marker: str
) -> Series:
    points = [(record["B"], point) for record in records if (point := point_of(record)) is not None]
    return Series(
        f"measured, {label}",
        [point.ms_per_token for _, point in points],
        [point.tokens_per_second for _, point in points],
        colour,
        marker=marker,
        names=[f"B {rows}" for rows, _ in points],
    )


def main() -> None:
    args = reproduction.speculation_parser(__doc__.splitlines()[0], SIZES).parse_args()
    reproduction.present(args, reproduction.speculation_cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
