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
from common.tables import console
from reproduce.paper import columns, reproduction
from reproduce.paper.curves import acceptance_curves
from reproduce.paper.figures import BLACK, Figure, Panel, Series
from reproduce.paper.published import Record, published
from reproduce.paper.reproduction import Acceptance

NAME = "acceptance_by_context"


def table(records: list[Record]) -> str:
    facts = published().acceptance
    rows = columns.beside(columns.rows_of(records), facts, any_target=True)
    measured = "acceptance_rate", "judged", "distinct_4gram_fraction"
    shown = columns.of(*columns.ACCEPTANCE, columns.published_column(), *measured)
    return (
        "  Acceptance rate of self-speculation by context\n\n"
        f"{columns.differences(records)}\n  The published model is {facts[0].target}.\n\n{console(rows, shown)}"
    )


def figure(records: list[Record]) -> Figure:
    facts, budget = published().acceptance, published().draft_budget
    label = f"published, {facts[0].target}, {published().draft_policy}"
    points = Series(label, [fact.context for fact in facts], [fact.value for fact in facts], BLACK, True)
    # One budget in this figure: the published one, or else the first that was measured.
    rows = columns.rows_of(records)
    budgets = [row["draft_budget"] for row in rows if row["draft_budget"] is not None]
    shown = budget if budget in budgets or not budgets else budgets[0]
    kept = [row for row in rows if row["draft_policy"] == "full" or row["draft_budget"] == shown]
    title = f"published: budget {budget}; measured: budget {shown}"
    panel = Panel(title, "context, tokens", "acceptance rate", (points, *acceptance_curves(kept, "prefix_len")))
    return Figure("Acceptance by context", (panel,))


@dataclass(frozen=True)
class Flags(Acceptance):
    prefix_len: tuple[int, ...] = (1000, 2000, 4000)
    """prompt tokens per row"""


def main(flags: Flags) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
