"""Acceptance of self-speculation by the budget of the draft's cache, published and measured side by side.

python reproduce/acceptance_by_budget.py
python reproduce/acceptance_by_budget.py --model CHECKPOINT --prefix_len 16000 --draft_budget 64 128 256 512 1024
"""

import sys
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.tables import console
from reproduce.paper import columns, reproduction
from reproduce.paper.curves import acceptance_curves
from reproduce.paper.figures import BLACK, Figure, Panel, Series
from reproduce.paper.published import Record, published, same_context
from reproduce.paper.reproduction import Acceptance

NAME = "acceptance_by_budget"


def table(records: list[Record]) -> str:
    facts = published()
    rows = columns.beside(columns.rows_of(records), facts.acceptance, any_target=True)
    own = [row for row in rows if "text" in row]
    measured = "acceptance_rate", "judged", "distinct_4gram_fraction"
    shown = columns.of(*columns.ACCEPTANCE, columns.published_column(), *measured)
    return (
        "  Acceptance rate of self-speculation by budget\n\n"
        f"{columns.differences(records)}\n"
        f"  Published numbers are for a budget of {facts.draft_budget} and {facts.acceptance[0].target} only.\n\n"
        + console(sorted(own, key=itemgetter("prefix_len", "draft_policy", "text")) or rows, shown)
    )


def figure(records: list[Record]) -> Figure:
    facts = published()
    target = facts.acceptance[0].target
    panels = []
    for context in sorted({record["prefix_len"] for record in records}) or [facts.acceptance[0].context]:
        alphas = [fact.value for fact in facts.acceptance if same_context(fact.context, context)]
        budgets = [facts.draft_budget] * len(alphas)
        points = Series(f"published, {target}, {facts.draft_policy}", budgets, alphas, BLACK, is_published=True)
        own = [row for row in columns.rows_of(records) if row["prefix_len"] == context]
        own = [row for row in own if row["draft_policy"] != "full"]
        series = (*([points] if alphas else []), *acceptance_curves(own, "draft_budget"))
        panels.append(Panel(f"context of {context} tokens", "budget, KV entries", "acceptance rate", series))
    return Figure("Acceptance by budget", tuple(panels))


@dataclass(frozen=True)
class Flags(Acceptance):
    prefix_len: tuple[int, ...] = (4000,)
    """prompt tokens per row"""
    draft_budget: tuple[int, ...] = (64, 128, 256, 512)
    """KV entries of the draft"""


def main(flags: Flags) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
