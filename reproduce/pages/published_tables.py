"""Tables of all published numbers: what was measured of the same, what is predicted, what was measured near it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from engine.cost_model.costs import tokens_per_round
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce import acceptance_by_context, cost_ratios
from reproduce.pages.page_records import Records, link
from reproduce.paper import reproduction
from reproduce.paper.published import SELF, Ratio, Speedup, published, same_context
from reproduce.paper.reproduction import (
    NONE,
    SLOWER,
    Record,
    machine_name,
    number,
    published_speedup_text,
    published_text,
    quotient,
    speedup_text,
)
from reproduce.performance_page import grid

# How far from a published setting a measurement may be to be called the nearest one.
NEAR = 2.0


def measured_speedup(records: Records, fact: Speedup) -> str:
    """Of the published model at the published size."""
    found = [
        record
        for record in records.speculation
        if _is_target(record, fact)
        and reproduction.draft_name(record) == fact.draft
        and fact.gamma in (None, record["gamma"])
        and record["draft_budget"] == published().draft_budget
        and record.get("speedup") is not None
    ]
    return _listed(found, lambda r: f"{link(speedup_text(r['speedup']), r)} ({_details(r)})")


def predicted_speedup(records: Records, fact: Speedup) -> str:
    """Expected tokens of a round by the published acceptance, over the measured time of a round in plain steps.

    Only where the costs are those of the published draft: its budget, and weights as the target's.
    """
    alpha = published().alpha(fact.target, fact.draft, fact.context)
    if alpha is None:
        return "-"
    found = [
        record
        for record in records.costs
        if _is_target(record, fact)
        and reproduction.draft_name(record) == fact.draft == SELF
        and fact.gamma in (None, record["gamma"])
        and record["draft_budget"] == published().draft_budget
        and has_plain_draft(record)
        and quotient(record, "round_ms") is not None
    ]

    def show(record: Record) -> str:
        predicted = tokens_per_round(alpha, record["gamma"]) / (quotient(record, "round_ms") or math.nan)
        return f"predicted {link(speedup_text(predicted), record)} (acceptance {alpha}, {_details(record)})"

    return _listed(found, show)


def has_plain_draft(record: Record) -> bool:
    """Whether the draft's weights are stored as the target's, as in what was published."""
    return record.get("draft_weights") in (None, "same") and record.get("draft_dtype") == record.get("dtype")


def _is_target(record: Record, fact: Speedup | Ratio) -> bool:
    return (
        published().is_model(fact.target, record.get("model"))
        and record["B"] == fact.B
        and same_context(record["prefix_len"], fact.context)
    )


def _details(record: Record) -> str:
    """What a reader has to know of a measurement that stands beside a published number."""
    kv = record.get("kv_dtype")
    parts = [machine_name(record), f"gamma {record['gamma']}", f"{record['prefix_len']} tokens"]
    return ", ".join(parts + ([f"{kv} KV"] if kv and kv != record.get("dtype") else []))


def _listed(records: Iterable[Record], show: Callable[[Record], str]) -> str:
    return "; ".join(map(show, records)) or NONE


def nearest(records: Sequence[Record], fact: Speedup) -> Record | None:
    """The built-in model's run with the same kind of draft and the nearest size, if it is within a factor of NEAR."""
    kind = fact.draft == SELF
    found = []
    for record in records:
        away = abs(math.log(record["prefix_len"] / fact.context)), abs(math.log(record["B"] / fact.B))
        if (
            record["model"] == DEFAULT_NAME
            and (reproduction.draft_name(record) == SELF) == kind
            and record.get("speedup") is not None
            and max(away) <= math.log(NEAR) + 1e-9
        ):
            found.append((sum(away), abs(record["gamma"] - (fact.gamma or record["gamma"])), record))
    return min(found, key=lambda one: one[:2])[2] if found else None


def nearest_speedup(records: Records, fact: Speedup) -> str:
    record = nearest(records.speculation, fact)
    if record is None:
        return "-"
    size = f"{record['B']} rows, {record['prefix_len']} tokens, gamma {record['gamma']}, {machine_name(record)}"
    return f"{link(speedup_text(record['speedup']), record)} ({size})"


COLUMNS = ["measured on the same model", "predicted from measured costs", "nearest on the built-in model"]


def speedups(facts: Sequence[Speedup], records: Records) -> str:
    lines = [
        [
            fact.target,
            fact.draft,
            str(fact.context),
            str(fact.B),
            str(fact.gamma or "not shown"),
            published_speedup_text(fact.speedup),
            measured_speedup(records, fact),
            predicted_speedup(records, fact),
            nearest_speedup(records, fact),
        ]
        for fact in facts
    ]
    return grid(["target", "draft", "context", "rows", "gamma", "published", *COLUMNS], lines)


def acceptance(records: Records) -> str:
    lines = []
    for fact in published().acceptance:
        rows = [
            row
            for row in acceptance_by_context.rows_of(records.acceptance)
            if acceptance_by_context.published_alpha(row) is not None
            and same_context(row["prefix_len"], fact.context)
            and row["acceptance_rate"] is not None
        ]
        same = [row for row in rows if published().is_model(fact.target, row["model"])]
        built_in = [row for row in rows if row["model"] == DEFAULT_NAME]
        lines.append(
            [fact.target, fact.draft, str(fact.context), published_text(fact.alpha), _alphas(same), _alphas(built_in)]
        )
    return grid(["target", "draft", "context", "published", COLUMNS[0], "same context on the built-in model"], lines)


def _alphas(rows: Sequence[Record]) -> str:
    return _listed(
        rows, lambda row: f"{link(number(row['acceptance_rate'], 3), row)} ({row['text']} text, {machine_name(row)})"
    )


def ratios(records: Records) -> str:
    lines = []
    for fact in published().ratios:
        found = [
            record
            for record in (*records.speculation, *records.costs)
            if cost_ratios.is_same(fact, record)
            and (fact.kind == "verify" or has_plain_draft(record))
            and cost_ratios.ratio_of(record, fact.kind) is not None
        ]

        def show(record: Record, kind: str = fact.kind) -> str:
            weights = "random weights, " if record.get("load_format") == "dummy" else ""
            return f"{link(number(cost_ratios.ratio_of(record, kind)), record)} ({weights}{_details(record)})"

        at = f"gamma {fact.gamma}" if fact.gamma else f"budget {fact.budget}"
        place = [cost_ratios.KINDS[fact.kind], fact.target, at, str(fact.context), str(fact.B)]
        lines.append([*place, published_text(fact.ratio), _listed(found, show)])
    return grid(["ratio", "target", "at", "context", "rows", "published", "measured on the same shape"], lines)


def published_section(records: Records) -> str:
    facts = published()
    parts = [
        "## Published numbers\n\n"
        f"{facts.setting}. {facts.source} All of them are below.\n\n"
        f"- *{COLUMNS[0]}*: the published models at the published size, run by Foretoken, on the machine named there.\n"
        f"- *{COLUMNS[1]}*: no run, marked as predicted: the published acceptance for that context, and the times of a "
        "step and of a round that were measured with random weights of that shape; `-` where no acceptance is "
        "published. `speedup = Omega(gamma, alpha) * plain step / round`.\n"
        f"- *{COLUMNS[2]}*: {DEFAULT_NAME} within a factor of {NEAR:g} in rows and in context, with the same kind of "
        "draft. It is another model on another machine, so it says nothing about the published number; `-` where "
        "nothing that near was measured.\n\n"
        f"`{SLOWER}`: slower than plain decoding. The published formula: `{facts.formula}`."
    ]
    for machine in facts.machines:
        rows = [fact for fact in facts.speedup_tables if fact.machine == machine]
        parts.append(f"### Speedups on {machine}\n\n{facts.notes['speedup_tables']}\n\n{speedups(rows, records)}")
    parts.append(f"### Acceptance by context\n\n{facts.notes['acceptance']}\n\n{acceptance(records)}")
    for target, draft in dict.fromkeys((fact.target, fact.draft) for fact in facts.figure_6):
        rows = [fact for fact in facts.figure_6 if (fact.target, fact.draft) == (target, draft)]
        title = f"Figure 6: {target}, {'self-speculation' if draft == SELF else f'{draft} drafts'}, {rows[0].machine}"
        parts.append(f"### {title}\n\n{facts.notes['figure_6']}\n\n{speedups(rows, records)}")
    parts.append(f"### Ratios of costs\n\n{facts.notes['ratios']}\n\n{ratios(records)}")
    return "\n\n".join(parts)
