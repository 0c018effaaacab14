"""Tables of all published numbers: what was measured of the same, what is predicted, what was measured near it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from common.tables import Column, markdown
from engine.cost_model.costs import tokens_per_round
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce.pages.page_records import Records, link
from reproduce.paper.columns import (
    KINDS,
    NONE,
    SLOWER,
    machine_name,
    published_speedup_text,
    published_text,
    quotient,
    rows_of,
    speedup_text,
)
from reproduce.paper.published import SELF, Fact, Record, draft_name, published

# How far from a published setting a measurement may be to be called the nearest one.
NEAR = 2.0
MEASURED, PREDICTED, NEAREST = (
    "measured on the same model",
    "predicted from measured costs",
    "nearest on the built-in model",
)


def _of(name: str, head: str, **how: str) -> Column:
    return Column(attrgetter(name), head, **how)


MODELS = _of("target", "target", align="<"), _of("draft", "draft", align="<")
SIZE = _of("context", "context"), _of("B", "rows")


def _listed(records: Iterable[Record], show: Callable[[Record], str]) -> str:
    return "; ".join(map(show, records)) or NONE


def _details(record: Record) -> str:
    """What a reader has to know of a measurement that stands beside a published number."""
    kv = record.get("kv_dtype")
    parts = [machine_name(record), f"gamma {record['gamma']}", f"{record['prefix_len']} tokens"]
    return ", ".join(parts + ([f"{kv} KV"] if kv and kv != record.get("dtype") else []))


def measured_speedup(records: Records, fact: Fact) -> str:
    """Of the published model in the published setting."""
    found = [record for record in records.speculation if fact.is_of(record) and record.get("speedup") is not None]
    return _listed(found, lambda record: f"{link(speedup_text(record['speedup']), record)} ({_details(record)})")


def predicted_speedup(records: Records, fact: Fact) -> str:
    """Expected tokens of a round by the published acceptance, over the measured time of a round in plain steps.

    Only where the costs are those of the published draft: its budget, and weights as the target's.
    """
    alpha = published().alpha(fact.target, fact.draft, fact.context)
    if alpha is None:
        return "-"

    def show(record: Record) -> str:
        predicted = tokens_per_round(alpha, record["gamma"]) / (quotient(record, "round_ms") or math.nan)
        return f"predicted {link(speedup_text(predicted), record)} (acceptance {alpha}, {_details(record)})"

    found = [record for record in records.costs if fact.is_of(record) and fact.draft == SELF]
    return _listed((r for r in found if has_plain_draft(r) and quotient(r, "round_ms") is not None), show)


def has_plain_draft(record: Record) -> bool:
    """Whether the draft's weights are stored as the target's, as in what was published."""
    return record.get("draft_weights") in (None, "same") and record.get("draft_dtype") == record.get("dtype")


def nearest(records: Sequence[Record], fact: Fact) -> Record | None:
    """The built-in model's run with the same kind of draft and the nearest size, if it is within a factor of NEAR."""
    found = []
    for record in records:
        away = abs(math.log(record["prefix_len"] / fact.context)), abs(math.log(record["B"] / (fact.B or 1)))
        if (
            record["model"] == DEFAULT_NAME
            and (draft_name(record) == SELF) == (fact.draft == SELF)
            and record.get("speedup") is not None
            and max(away) <= math.log(NEAR) + 1e-9
        ):
            found.append((sum(away), abs(record["gamma"] - (fact.gamma or record["gamma"])), record))
    return min(found, key=lambda one: one[:2])[2] if found else None


def nearest_speedup(records: Records, fact: Fact) -> str:
    record = nearest(records.speculation, fact)
    if record is None:
        return "-"
    size = f"{record['B']} rows, {record['prefix_len']} tokens, gamma {record['gamma']}, {machine_name(record)}"
    return f"{link(speedup_text(record['speedup']), record)} ({size})"


def speedups(facts: Sequence[Fact], records: Records) -> str:
    beside = [
        Column(lambda fact, of=of: of(records, fact), head, align="<")
        for of, head in ((measured_speedup, MEASURED), (predicted_speedup, PREDICTED), (nearest_speedup, NEAREST))
    ]
    gamma = _of("gamma", "gamma", missing="not shown")
    value = Column(attrgetter("value"), "published", published_speedup_text)
    return markdown(facts, [*MODELS, *SIZE, gamma, value, *beside])


def acceptance(records: Records) -> str:
    rows = [row for row in rows_of(records.acceptance) if row["acceptance_rate"] is not None]

    def rates(head: str, is_model: Callable[[Fact, Record], bool]) -> Column:
        def found(fact: Fact) -> str:
            return _listed((row for row in rows if fact.is_setting_of(row) and is_model(fact, row)), show)

        return Column(found, head, align="<")

    def show(row: Record) -> str:
        rate = f"{row['acceptance_rate']:.3f}"
        return f"{link(rate, row)} ({row['text']} text, {machine_name(row)})"

    value = Column(attrgetter("value"), "published", published_text)
    same = rates(MEASURED, lambda fact, row: fact.is_of(row))
    built_in = rates("same context on the built-in model", lambda _, row: row["model"] == DEFAULT_NAME)
    return markdown(published().acceptance, [*MODELS, SIZE[0], value, same, built_in])


def ratios(records: Records) -> str:
    def measured(fact: Fact) -> str:
        def show(record: Record) -> str:
            ratio = f"{quotient(record, step):.2f}"
            weights = "random weights, " if record.get("load_format") == "dummy" else ""
            return f"{link(ratio, record)} ({weights}{_details(record)})"

        step = f"{fact.what}_step_ms"
        of_fact = [record for record in (*records.speculation, *records.costs) if fact.is_of(record)]
        of_fact = [record for record in of_fact if fact.what == "verify" or has_plain_draft(record)]
        return _listed((record for record in of_fact if quotient(record, step) is not None), show)

    columns = [
        Column(lambda fact: KINDS[fact.what], "ratio", align="<"),
        MODELS[0],
        Column(lambda fact: f"gamma {fact.gamma}" if fact.gamma else f"budget {fact.budget}", "at", align="<"),
        *SIZE,
        Column(attrgetter("value"), "published", published_text),
        Column(measured, "measured on the same shape", align="<"),
    ]
    return markdown(published().ratios, columns)


def published_section(records: Records) -> str:
    facts = published()
    parts = [
        "## Published numbers\n\n"
        f"{facts.setting}. {facts.source} All of them are below.\n\n"
        f"- *{MEASURED}*: the published models at the published size, run by Foretoken, on the machine named there.\n"
        f"- *{PREDICTED}*: no run, marked as predicted: the published acceptance for that context, and the times of a "
        "step and of a round that were measured with random weights of that shape; `-` where no acceptance is "
        "published. `speedup = Omega(gamma, alpha) * plain step / round`.\n"
        f"- *{NEAREST}*: {DEFAULT_NAME} within a factor of {NEAR:g} in rows and in context, with the same kind of "
        "draft. It is another model on another machine, so it says nothing about the published number; `-` where "
        "nothing that near was measured.\n\n"
        f"`{SLOWER}`: slower than plain decoding. The published formula: `{facts.formula}`."
    ]
    for machine in dict.fromkeys(fact.machine for fact in facts.speedup_tables):
        rows = [fact for fact in facts.speedup_tables if fact.machine == machine]
        parts.append(f"### Speedups on {machine}\n\n{facts.notes['speedup_tables']}\n\n{speedups(rows, records)}")
    parts.append(f"### Acceptance by context\n\n{facts.notes['acceptance']}\n\n{acceptance(records)}")
    for target, draft in dict.fromkeys((fact.target, fact.draft) for fact in facts.figure_6):
        rows = [fact for fact in facts.figure_6 if (fact.target, fact.draft) == (target, draft)]
        title = f"Figure 6: {target}, {'self-speculation' if draft == SELF else f'{draft} drafts'}, {rows[0].machine}"
        parts.append(f"### {title}\n\n{facts.notes['figure_6']}\n\n{speedups(rows, records)}")
    parts.append(f"### Ratios of costs\n\n{facts.notes['ratios']}\n\n{ratios(records)}")
    return "\n\n".join(parts)
