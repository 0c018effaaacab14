"""Tables of all published numbers: what was measured of the same, what is predicted, what was measured near it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from common.tables import Column, markdown
from engine.cost_model.costs import tokens_per_round
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce.pages.generated_page import link
from reproduce.paper import columns
from reproduce.paper.columns import NONE, machine_name, over, published_text, speedup_text
from reproduce.paper.predicted import is_acceptance_known, predict
from reproduce.paper.published import SELF, Record, draft_name, is_of, is_setting_of, pairs_of, published, target_name

# How far from a published setting a measurement may be to be called the nearest one.
NEAR = 2.0
MEASURED, SAME_CONTEXT = "measured on the same model", "same context on the built-in model"
TARGET, DRAFT, CONTEXT, ROWS = columns.of("target", "draft", "prefix_len", "B")
VALUE = Column("value", "published", published_text)
Value = Callable[[Record], float | None]
Shown = Callable[[Any], str]


@dataclass(frozen=True)
class Records:
    """What was measured: runs of speculation, runs of random weights, which are costs, and rows of acceptance."""

    speculation: list[Record]
    costs: list[Record]
    acceptance: list[Record]


def _listed(records: Sequence[Record], value: Value, show: Shown, say: Shown, mark: str = "") -> str:
    """The records that have a value: it, behind the mark, linked to the record, and what is said of the record."""
    known = [(record, value(record)) for record in records]
    return "; ".join(f"{mark}{link(show(v), record)} ({say(record)})" for record, v in known if v is not None) or NONE


def _details(record: Record) -> str:
    """What a reader has to know of a measurement that stands beside a published number."""
    kv = record.get("kv_dtype")
    own = f", {kv} KV" if kv and kv != record.get("dtype") else ""
    return f"{machine_name(record)}, gamma {record['gamma']}, {record['prefix_len']} tokens{own}"


def measured_speedup(records: Records, fact: Record) -> str:
    """Of the published model in the published setting."""
    found = [record for record in records.speculation if is_of(fact, record)]
    return _listed(found, itemgetter("speedup"), speedup_text, _details)


def predicted_speedup(records: Records, fact: Record) -> str:
    """Expected tokens of a round by the published acceptance, over the measured time of a round in plain steps.

    Only where the costs are those of the published draft: its budget, and weights as the target's.
    """
    alpha = published().alpha(target_name(fact), draft_name(fact), fact["prefix_len"])
    if alpha is None:
        return "-"

    def predicted(record: Record) -> float | None:
        round_in_steps = over("round_ms")(record)
        return tokens_per_round(alpha, record["gamma"]) / round_in_steps if round_in_steps else None

    found = [record for record in records.costs if is_of(fact, record) and has_plain_draft(record)]
    return _listed(found, predicted, speedup_text, lambda of: f"acceptance {alpha}, {_details(of)}", "predicted ")


def has_plain_draft(record: Record) -> bool:
    """Whether the draft's weights are stored as the target's, as in what was published."""
    return record.get("draft_weights") in (None, "same") and record.get("draft_dtype") == record.get("dtype")


def by_roofline(fact: Record) -> str:
    """What data sheets predict, and how far that is off; marked where the acceptance is assumed."""
    value, is_ratio = predict(fact), "kind" in fact
    mark = "" if is_ratio or is_acceptance_known(fact) else "?"
    return f"{f'{value:.2f}' if is_ratio else speedup_text(value)}{mark} ({value / fact['value'] - 1:+.0%})"


def nearest_speedup(records: Records, fact: Record) -> str:
    """The built-in model's run with the same kind of draft and the nearest size, if it is within a factor of NEAR."""
    sizes, is_self = ("prefix_len", "B"), draft_name(fact) == SELF

    def away(record: Record) -> tuple[float, int]:
        gamma = fact["gamma"] or record["gamma"]
        return sum(abs(math.log(record[size] / fact[size])) for size in sizes), abs(record["gamma"] - gamma)

    near = [
        record
        for record in records.speculation
        if record["model"] == DEFAULT_NAME and (draft_name(record) == SELF) == is_self
        if record.get("speedup") is not None
        if all(1 / NEAR <= record[size] / fact[size] <= NEAR for size in sizes)
    ]
    if not near:
        return "-"
    one = min(near, key=away)
    said = f"{one['B']} rows, {one['prefix_len']} tokens, gamma {one['gamma']}, {machine_name(one)}"
    return f"{link(speedup_text(one['speedup']), one)} ({said})"


def speedups(facts: Sequence[Record], records: Records) -> str:
    own = [
        Column("gamma", "gamma", missing="not shown"),
        Column("value", "published", columns.published_speedup_text),
        BY_ROOFLINE,
        Column(partial(measured_speedup, records), MEASURED, align="<"),
        Column(partial(predicted_speedup, records), "predicted from measured costs", align="<"),
        Column(partial(nearest_speedup, records), "nearest on the built-in model", align="<"),
    ]
    return markdown(facts, [TARGET, DRAFT, CONTEXT, ROWS, *own])


def acceptance(records: Records) -> str:
    built_in = [row for row in records.acceptance if row["model"] == DEFAULT_NAME]

    def beside(head: str, rows: Sequence[Record], counts: Callable[[Record, Record], bool]) -> Column:
        def listed(fact: Record) -> str:
            found = [row for row in rows if counts(fact, row)]
            return _listed(found, itemgetter("acceptance_rate"), "{:.3f}".format, say)

        return Column(listed, head, align="<")

    def say(row: Record) -> str:
        return f"{row['text']} text, {machine_name(row)}"

    same, near = beside(MEASURED, records.acceptance, is_of), beside(SAME_CONTEXT, built_in, is_setting_of)
    return markdown(published().acceptance, [TARGET, DRAFT, CONTEXT, VALUE, same, near])


def ratios(records: Records) -> str:
    def at(fact: Record) -> str:
        return f"gamma {fact['gamma']}" if fact["gamma"] else f"budget {fact['draft_budget']}"

    def say(record: Record) -> str:
        return ("random weights, " if record.get("load_format") == "dummy" else "") + _details(record)

    def measured(fact: Record) -> str:
        kind, runs = fact["kind"], [*records.speculation, *records.costs]
        found = [run for run in runs if is_of(fact, run) and (kind == "verify" or has_plain_draft(run))]
        return _listed(found, over(f"{kind}_step_ms"), "{:.2f}".format, say)

    kind, setting = Column("kind", "ratio", columns.KINDS.get, align="<"), Column(at, "at", align="<")
    own = Column(measured, "measured on the same shape", align="<")
    return markdown(published().ratios, [kind, TARGET, setting, CONTEXT, ROWS, VALUE, BY_ROOFLINE, own])


BY_ROOFLINE = Column(by_roofline, "predicted by the roofline (error)", align="<")


def published_tables(records: Records) -> dict[str, Any]:
    """What stands at each place of the template."""
    facts = published()
    return {
        "by_machine": {machine: speedups(own, records) for machine, own in facts.by_machine.items()},
        "by_pair": {", ".join(pair): speedups(own, records) for pair, own in pairs_of(facts.figure_6).items()},
        "acceptance_by_context": acceptance(records),
        "ratios": ratios(records),
    }
