"""The table of a benchmark for people, made of its record."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from common.tables import Column, console
from engine.bench.config import AUTO

COLUMNS = [
    Column(itemgetter(0), "", align="<"),
    Column(itemgetter(1), "plain decoding"),
    Column(itemgetter(2), "speculation"),
]


def table(record: dict[str, Any]) -> str:
    """The record's headline as a short table: a line for each figure."""

    def of_speculation(figure: str, key: str, digits: int) -> tuple[str, str, str]:
        return figure, "-", _number(record[key], digits)

    baseline_ms = record["baseline_step_ms"]
    one, unit = ("-", "-") if baseline_ms is None else ("1", "1.00")
    tokens = record["baseline_tokens_per_second"], record["decode_tokens_per_second"]
    lines = [
        ("tokens per second", *map(_number, tokens)),
        ("ms per step / round", _number(baseline_ms), _number(record["round_ms"])),
        ("speedup (all rows busy)", unit, _number(record["speedup"], 2)),
        ("speedup (to the last row)", unit, _number(record["wall_speedup"], 2)),
        of_speculation("acceptance rate", "acceptance_rate", 3),
        (f"tokens per round (of {_most_tokens(record)})", one, _number(record["mean_accepted_length"], 2)),
        ("identical rows", "-", _identical(record)),
    ]
    if record["verify_step_ms"] is not None:
        lines += [
            of_speculation("ms per draft step", "draft_step_ms", 1),
            of_speculation("ms per verification", "verify_step_ms", 1),
            of_speculation("ms of a round's rest", "other_ms_per_round", 1),
        ]
    if record["benchmark"] == "baseline":
        return console(lines[:2], COLUMNS[:2])
    shown = console(lines, COLUMNS)
    if AUTO in (record["gamma"], record["draft_budget"]):
        shown += f"\n  rounds by choice: {_chosen(record)}"
    return shown


def _chosen(record: dict[str, Any]) -> str:
    """What rounds chose: `gamma 3: 12 rounds`, with the budget where that is chosen, too."""
    parts = []
    for choice in record["choices"]:
        budget = f"{choice['draft_budget']} entries, " if record["draft_budget"] == AUTO else ""
        parts.append(f"{choice['rounds']} x " + (f"{budget}gamma {choice['gamma']}" if choice["gamma"] else "plain"))
    return "; ".join(parts)


def _most_tokens(record: dict[str, Any]) -> str:
    """What a round can emit at most."""
    return "gamma + 1" if record["gamma"] == AUTO else str(record["gamma"] + 1)


def _identical(record: dict[str, Any]) -> str:
    same = record["identical_sequences"]
    if same is None:
        return "-" if record["baseline_step_ms"] is None else "not meant to be"
    return f"{same} of {record['sequences']}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
