"""Acceptance of self-speculation by the length of the context and by the budget of the draft's cache, published and
measured side by side.

python reproduce/acceptance_tables.py
python reproduce/acceptance_tables.py --fixed model=CHECKPOINT --axis prefix_len=4000,8000 --fixed budgets=[128,512]
"""

from operator import itemgetter

from common import cli
from reproduce.paper import columns, tables
from reproduce.paper.figures import Figure, Panel, Series, acceptance_curves, by_budget
from reproduce.paper.published import Record, published, same_context
from reproduce.paper.reproduction import ACCEPTANCE, showing

Y = "acceptance rate"


def table(records: list[Record]) -> str:
    rows, budget = columns.rows_of(records), published().draft_budget
    note = f"Published numbers are for a budget of {budget} and {published().acceptance[0]['model']} only."
    published_ones, own = tables.published_acceptance(rows), tables.acceptance(rows)
    return tables.side_by_side("Acceptance rate of self-speculation", note, published_ones, own)


def context_figure(records: list[Record]) -> Figure:
    """One budget in this figure: the published one, or else the first that was measured."""
    budget, rows = published().draft_budget, columns.rows_of(records)
    budgets = [row["draft_budget"] for row in rows if row["draft_budget"] is not None]
    shown = budget if budget in budgets or not budgets else budgets[0]
    kept = [row for row in rows if row["draft_policy"] == "full" or row["draft_budget"] == shown]
    curves = acceptance_curves(published().acceptance, kept, "prefix_len")
    title = f"published: budget {budget}; measured: budget {shown}"
    return Figure("Acceptance by context", [Panel(title, "context, tokens", Y, curves)])


def budget_figure(records: list[Record]) -> Figure:
    """A panel for each context that was measured with a budget, or else for the first published one."""
    rows = [row for row in columns.rows_of(records) if row["draft_policy"] != "full"] or published().acceptance[:1]
    rows.sort(key=itemgetter("prefix_len"))
    return by_budget("Acceptance by budget", rows, "context of {prefix_len} tokens", Y, budget_curves)


def budget_curves(rows: list[Record]) -> list[Series]:
    """Of one context."""
    known = [fact for fact in published().acceptance if same_context(fact["prefix_len"], rows[0]["prefix_len"])]
    return acceptance_curves(known, rows, "draft_budget")


FIGURES = {"acceptance_by_context": context_figure, "acceptance_by_budget": budget_figure}

if __name__ == "__main__":
    cli.run_alone(*showing(ACCEPTANCE, table, FIGURES))
