"""The tables of published numbers, with what was measured of the same beside them, and of all runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from common.tables import Column, console
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce.paper import columns
from reproduce.paper.columns import KINDS, NONE, by_size, machine_name, of, speedup_text
from reproduce.paper.predicted import is_acceptance_known, predict
from reproduce.paper.published import Record, is_of, is_setting_of, published

MEASURED, SHAPE = "measured on the same model", "measured on the same shape"
GAMMA = Column("gamma", "gamma", missing="not shown")
VALUE = Column("value", "published", columns.published_text)
SPEEDUP_VALUE = Column("value", "published", partial(speedup_text, show=columns.published_text))
RATIO = Column("kind", "ratio", KINDS.get, align="<")
AT = Column(
    lambda fact: f"gamma {fact['gamma']}" if fact["gamma"] else f"budget {fact['draft_budget']}", "at", align="<"
)


class Table(NamedTuple):
    rows: Sequence[Record]
    columns: Sequence[Column]


def side_by_side(title: str, note: str, *tables: Table) -> str:
    head = f"  {title}\n\n  published: {published().setting}\n  {note}"
    return "\n\n".join([head, *(console(*table) if table.rows else f"  {NONE}" for table in tables)])


def published_speedups(facts: Sequence[Record], runs: Sequence[Record]) -> Table:
    own = beside(MEASURED, runs, "speedup")
    return Table(facts, of("target draft prefix_len B", GAMMA, SPEEDUP_VALUE, BY_ROOFLINE, own))


def published_acceptance(rows: Sequence[Record]) -> Table:
    built_in = [row for row in rows if row["model"] == DEFAULT_NAME]
    near = beside("same context on the built-in model", built_in, "acceptance_rate", is_setting_of)
    own = beside(MEASURED, rows, "acceptance_rate")
    return Table(published().acceptance, of("target draft prefix_len", VALUE, own, near))


def published_ratios(runs: Sequence[Record]) -> Table:
    """Of draft steps only where the draft's weights are stored as the target's, as in what was published."""
    plain = [run for run in runs if run.get("draft_dtype") == run.get("dtype")]
    own = {"verify": runs, "draft": [run for run in plain if run.get("draft_weights") in (None, "same")]}

    def listed(fact: Record) -> str:
        return beside(SHAPE, own[fact["kind"]], f"{fact['kind']}_over_plain").cell(fact)

    measured = Column(listed, SHAPE, align="<")
    return Table(published().ratios, of(RATIO, "target", AT, "prefix_len B", VALUE, BY_ROOFLINE, measured))


def beside(head: str, records: Sequence[Record], name: str, counts: Callable[..., bool] = is_of) -> Column:
    """What was measured of each published number, as the column of that name shows it, and in which setting."""
    [column] = of(name)

    def listed(fact: Record) -> str:
        found = [(column.cell(record), record) for record in records if counts(fact, record)]
        said = [f"{text} ({details(record)})" for text, record in found if text != NONE]
        return "; ".join(dict.fromkeys(said)) or NONE

    return Column(listed, head, align="<")


def details(record: Record) -> str:
    if "text" in record:
        return f"{record['text']} text, {machine_name(record)}"
    weights = "random weights, " if record.get("load_format") == "dummy" else ""
    kv = record.get("kv_dtype")
    own = f", {kv} KV" if kv and kv != record.get("dtype") else ""
    return f"{weights}{machine_name(record)}, gamma {record['gamma']}, {record['prefix_len']} tokens{own}"


def by_roofline(fact: Record) -> str:
    """What data sheets predict, and how far that is off; marked where the acceptance is assumed."""
    value, is_ratio = predict(fact), "kind" in fact
    mark = "" if is_ratio or is_acceptance_known(fact) else "?"
    return f"{f'{value:.2f}' if is_ratio else speedup_text(value)}{mark} ({value / fact['value'] - 1:+.0%})"


BY_ROOFLINE = Column(by_roofline, "predicted by the roofline (error)", align="<")


def of_runs(name: str, runs: Sequence[Record]) -> Table:
    """The table of that name: speedups, costs, or flow."""
    return Table(sorted(runs, key=by_size), of(name))


def acceptance(rows: Sequence[Record]) -> Table:
    def order(row: Record) -> tuple:
        return *by_size(row)[:3], row["text"], row["draft_policy"], row["draft_budget"] or 0

    return Table(sorted(rows, key=order), of("acceptance"))
