"""The table of a benchmark for people, made of its record."""

from __future__ import annotations

from typing import Any

from engine.bench.settings import AUTO


def table(record: dict[str, Any]) -> str:
    """The record's headline as a short table."""
    one, unit = ("-", "-") if record["baseline_step_ms"] is None else ("1", "1.00")
    rows: list[tuple[str, str, str]] = [
        ("", "plain decoding", "speculation"),
        (
            "tokens per second",
            _number(record["baseline_tokens_per_second"]),
            _number(record["decode_tokens_per_second"]),
        ),
        ("ms per step / round", _number(record["baseline_step_ms"]), _number(record["round_ms"])),
        ("speedup (all rows busy)", unit, _number(record["speedup"], 2)),
        ("speedup (to the last row)", unit, _number(record["wall_speedup"], 2)),
        ("acceptance rate", "-", _number(record["acceptance_rate"], 3)),
        (f"tokens per round (of {_most_tokens(record)})", one, _number(record["mean_accepted_length"], 2)),
        ("identical rows", "-", _identical(record)),
    ]
    if record["verify_step_ms"] is not None:
        rows += [
            ("ms per draft step", "-", _number(record["draft_step_ms"])),
            ("ms per verification", "-", _number(record["verify_step_ms"])),
            ("ms of a round's rest", "-", _number(record["other_ms_per_round"])),
        ]
    if AUTO in (record["gamma"], record["draft_budget"]):
        rows.append(("rounds by choice", "", _chosen(record)))
    if record["benchmark"] == "baseline":
        rows = [(name, plain, "") for name, plain, _ in rows[:3]]
    return "\n".join(f"  {name:<28}{plain:>16}{speculative:>18}".rstrip() for name, plain, speculative in rows)


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
