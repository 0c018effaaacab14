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

    def figure(key: str, digits: int = 1) -> str | None:
        return None if record[key] is None else f"{record[key]:.{digits}f}"

    one, unit = (None, None) if record["baseline_step_ms"] is None else ("1", "1.00")
    most = "gamma + 1" if record["gamma"] == AUTO else record["gamma"] + 1
    lines = [
        ("tokens per second", figure("baseline_tokens_per_second"), figure("decode_tokens_per_second")),
        ("ms per step / round", figure("baseline_step_ms"), figure("round_ms")),
        ("speedup (all rows busy)", unit, figure("speedup", 2)),
        ("speedup (to the last row)", unit, figure("wall_speedup", 2)),
        ("acceptance rate", None, figure("acceptance_rate", 3)),
        (f"tokens per round (of {most})", one, figure("mean_accepted_length", 2)),
        ("identical rows", None, _identical(record)),
    ]
    if record["verify_step_ms"] is not None:
        lines += [
            ("ms per draft step", None, figure("draft_step_ms")),
            ("ms per verification", None, figure("verify_step_ms")),
            ("ms of a round's rest", None, figure("other_ms_per_round")),
        ]
    if record["benchmark"] == "baseline":
        return console(lines[:2], COLUMNS[:2])
    shown = console(lines, COLUMNS)
    is_chosen = AUTO in (record["gamma"], record["draft_budget"])
    return f"{shown}\n  rounds by choice: {_chosen(record)}" if is_chosen else shown


def _identical(record: dict[str, Any]) -> str | None:
    same = record["identical_sequences"]
    if same is None:
        return None if record["baseline_step_ms"] is None else "not meant to be"
    return f"{same} of {record['sequences']}"


def _chosen(record: dict[str, Any]) -> str:
    """What rounds chose: `12 x gamma 3`, with the budget where that is chosen, too."""
    parts = []
    for choice in record["choices"]:
        budget = f"{choice['draft_budget']} entries, " if record["draft_budget"] == AUTO else ""
        parts.append(f"{choice['rounds']} x " + (f"{budget}gamma {choice['gamma']}" if choice["gamma"] else "plain"))
    return "; ".join(parts)
