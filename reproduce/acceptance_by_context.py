"""Acceptance of self-speculation by the length of the context, published and measured side by side.

python reproduce/acceptance_by_context.py
python reproduce/acceptance_by_context.py --model CHECKPOINT --prefix_len 4000 8000 16000 32000
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from reproduce.paper import columns, reproduction
from reproduce.paper.figures import Figure, Panel, acceptance_curves
from reproduce.paper.published import Record, published


def table(records: list[Record]) -> str:
    facts = published().acceptance
    rows = columns.beside(columns.rows_of(records), facts, any_target=True)
    title, note = "Acceptance rate of self-speculation by context", f"The published model is {facts[0]['model']}."
    return columns.side_by_side(title, records, note, rows, columns.ACCEPTED)


def figure(records: list[Record]) -> Figure:
    """One budget in this figure: the published one, or else the first that was measured."""
    budget, rows = published().draft_budget, columns.rows_of(records)
    budgets = [row["draft_budget"] for row in rows if row["draft_budget"] is not None]
    shown = budget if budget in budgets or not budgets else budgets[0]
    kept = [row for row in rows if row["draft_policy"] == "full" or row["draft_budget"] == shown]
    curves = acceptance_curves(published().acceptance, kept, "prefix_len")
    title = f"published: budget {budget}; measured: budget {shown}"
    return Figure("Acceptance by context", [Panel(title, "context, tokens", "acceptance rate", curves)])


@dataclass(frozen=True)
class Flags(reproduction.Acceptance):
    prefix_len: tuple[int, ...] = (1000, 2000, 4000)  # prompt tokens per row


if __name__ == "__main__":
    cli.run_alone(reproduction.showing("acceptance_by_context", table, figure), Flags)
