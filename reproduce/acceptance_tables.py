"""Acceptance of self-speculation by the length of the context and by the budget of the draft's cache, published and
measured side by side.

python reproduce/acceptance_tables.py
python reproduce/acceptance_tables.py --fixed model=CHECKPOINT --axis prefix_len=4000,8000 --fixed budgets=[128,512]
"""

import common.startup

from common import cli
from reproduce.paper import columns, tables
from reproduce.paper.figures import Figure, Panel, acceptance_curves
from reproduce.paper.published import Record, published, same_context
from reproduce.paper.reproduction import ACCEPTANCE, showing

Y = "acceptance rate"


def table(records: list[Record]) -> str:
    rows, budget = columns.rows_of(records), published().draft_budget
    note = f"Published numbers are for a budget of {budget} and {published().acceptance[0]['model']} only."
    published_ones, own = tables.published_acceptance(rows), tables.acceptance(rows)
    return tables.side_by_side("Acceptance rate of self-speculation", note, published_ones, own)


def by_context(records: list[Record]) -> Figure:
    """One budget in this figure: the published one, or else the first that was measured."""
    budget, rows = published().draft_budget, columns.rows_of(records)
    budgets = [row["draft_budget"] for row in rows if row["draft_budget"] is not None]
    shown = budget if budget in budgets or not budgets else budgets[0]
    kept = [row for row in rows if row["draft_policy"] == "full" or row["draft_budget"] == shown]
    curves = acceptance_curves(published().acceptance, kept, "prefix_len")
    title = f"published: budget {budget}; measured: budget {shown}"
    return Figure("Acceptance by context", [Panel(title, "context, tokens", Y, curves)])


def by_budget(records: list[Record]) -> Figure:
    facts, panels = published().acceptance, []
    rows = [row for row in columns.rows_of(records) if row["draft_policy"] != "full"]
    for context in sorted({row["prefix_len"] for row in rows}) or [facts[0]["prefix_len"]]:
        known = [fact for fact in facts if same_context(fact["prefix_len"], context)]
        curves = acceptance_curves(known, [row for row in rows if row["prefix_len"] == context], "draft_budget")
        panels.append(Panel(f"context of {context} tokens", "budget, KV entries", Y, curves))
    return Figure("Acceptance by budget", panels)


FIGURES = {"acceptance_by_context": by_context, "acceptance_by_budget": by_budget}

if __name__ == "__main__":
    cli.run_alone(*showing(ACCEPTANCE, table, FIGURES))
