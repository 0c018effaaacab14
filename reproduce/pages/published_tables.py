"""Tables of all published numbers: what was measured of the same, what is predicted, what was measured near it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, itemgetter

from common.tables import Column, markdown
from engine.cost_model.costs import tokens_per_round
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce.pages.page_records import Records, link
from reproduce.paper import columns
from reproduce.paper.columns import NONE, machine_name, published_text, quotient, speedup_text
from reproduce.paper.published import SELF, Fact, Record, draft_name, published

# How far from a published setting a measurement may be to be called the nearest one.
NEAR = 2.0
MEASURED = "measured on the same model"
PREDICTED = "predicted from measured costs"
NEAREST = "nearest on the built-in model"
MODELS = Column(attrgetter("target"), "target", align="<"), Column(attrgetter("draft"), "draft", align="<")
SIZE = Column(attrgetter("context"), "context"), Column(attrgetter("B"), "rows")
Value = Callable[[Record], float | None]


def _listed(
    records: Iterable[Record], value: Value, show: Callable[[float], str], say: Callable[[Record], str], mark: str = ""
) -> str:
    """The records that have a value: it, behind the mark, linked to the record, and what is said of the record."""
    known = [(record, value(record)) for record in records]
    return "; ".join(f"{mark}{link(show(v), record)} ({say(record)})" for record, v in known if v is not None) or NONE


def _details(record: Record) -> str:
    """What a reader has to know of a measurement that stands beside a published number."""
    kv = record.get("kv_dtype")
    parts = [machine_name(record), f"gamma {record['gamma']}", f"{record['prefix_len']} tokens"]
    return ", ".join(parts + ([f"{kv} KV"] if kv and kv != record.get("dtype") else []))


def measured_speedup(records: Records, fact: Fact) -> str:
    """Of the published model in the published setting."""
    return _listed(filter(fact.is_of, records.speculation), itemgetter("speedup"), speedup_text, _details)


def predicted_speedup(records: Records, fact: Fact) -> str:
    """Expected tokens of a round by the published acceptance, over the measured time of a round in plain steps.

    Only where the costs are those of the published draft: its budget, and weights as the target's.
    """
    alpha = published().alpha(fact.target, fact.draft, fact.context)
    if alpha is None:
        return "-"

    def predicted(record: Record) -> float | None:
        round_in_steps = quotient(record, "round_ms")
        return tokens_per_round(alpha, record["gamma"]) / round_in_steps if round_in_steps else None

    found = [
        record for record in records.costs if fact.draft == SELF and fact.is_of(record) and has_plain_draft(record)
    ]
    return _listed(found, predicted, speedup_text, lambda of: f"acceptance {alpha}, {_details(of)}", "predicted ")


def has_plain_draft(record: Record) -> bool:
    """Whether the draft's weights are stored as the target's, as in what was published."""
    return record.get("draft_weights") in (None, "same") and record.get("draft_dtype") == record.get("dtype")


def nearest_speedup(records: Records, fact: Fact) -> str:
    """The built-in model's run with the same kind of draft and the nearest size, if it is within a factor of NEAR."""

    def away(record: Record) -> tuple[float, float, int]:
        context, rows = abs(math.log(record["prefix_len"] / fact.context)), abs(math.log(record["B"] / (fact.B or 1)))
        return max(context, rows), context + rows, abs(record["gamma"] - (fact.gamma or record["gamma"]))

    found = [
        record
        for record in records.speculation
        if record["model"] == DEFAULT_NAME
        and (draft_name(record) == SELF) == (fact.draft == SELF)
        and record.get("speedup") is not None
        and away(record)[0] <= math.log(NEAR) + 1e-9
    ]
    if not found:
        return "-"
    one = min(found, key=lambda record: away(record)[1:])
    details = f"{one['B']} rows, {one['prefix_len']} tokens, gamma {one['gamma']}, {machine_name(one)}"
    return _listed([one], itemgetter("speedup"), speedup_text, lambda _: details)


def speedups(facts: Sequence[Fact], records: Records) -> str:
    beside = [
        Column(partial(of, records), head, align="<")
        for of, head in ((measured_speedup, MEASURED), (predicted_speedup, PREDICTED), (nearest_speedup, NEAREST))
    ]
    gamma = Column(attrgetter("gamma"), "gamma", missing="not shown")
    value = Column(attrgetter("value"), "published", columns.published_speedup_text)
    return markdown(facts, [*MODELS, *SIZE, gamma, value, *beside])


def acceptance(records: Records) -> str:
    rows = columns.rows_of(records.acceptance)

    def rates(head: str, counts: Callable[[Fact, Record], bool]) -> Column:
        def shown(fact: Fact) -> str:
            return _listed(
                (row for row in rows if counts(fact, row)), itemgetter("acceptance_rate"), "{:.3f}".format, say
            )

        return Column(shown, head, align="<")

    def say(row: Record) -> str:
        return f"{row['text']} text, {machine_name(row)}"

    same = rates(MEASURED, Fact.is_of)
    head = "same context on the built-in model"
    built_in = rates(head, lambda fact, row: row["model"] == DEFAULT_NAME and fact.is_setting_of(row))
    value = Column(attrgetter("value"), "published", published_text)
    return markdown(published().acceptance, [*MODELS, SIZE[0], value, same, built_in])


def ratios(records: Records) -> str:
    def measured(fact: Fact) -> str:
        found = [record for record in (*records.speculation, *records.costs) if fact.is_of(record)]
        found = [record for record in found if fact.what == "verify" or has_plain_draft(record)]
        return _listed(found, columns.over_plain_step(fact.what), "{:.2f}".format, say)

    def say(record: Record) -> str:
        return ("random weights, " if record.get("load_format") == "dummy" else "") + _details(record)

    shown = [
        Column(lambda fact: columns.KINDS[fact.what], "ratio", align="<"),
        MODELS[0],
        Column(lambda fact: f"gamma {fact.gamma}" if fact.gamma else f"budget {fact.budget}", "at", align="<"),
        *SIZE,
        Column(attrgetter("value"), "published", published_text),
        Column(measured, "measured on the same shape", align="<"),
    ]
    return markdown(published().ratios, shown)


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
        f"`{columns.SLOWER}`: slower than plain decoding. The published formula: `{facts.formula}`."
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
