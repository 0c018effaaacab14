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
from reproduce.paper import columns, reproduction
from reproduce.paper.figures import Figure, Panel, acceptance_curves
from reproduce.paper.published import Record, published, same_context


def table(records: list[Record]) -> str:
    budget, facts = published().draft_budget, published().acceptance
    rows = columns.beside(columns.rows_of(records), facts, any_target=True)
    own = sorted((row for row in rows if "text" in row), key=itemgetter("prefix_len", "draft_policy", "text"))
    title = "Acceptance rate of self-speculation by budget"
    note = f"Published numbers are for a budget of {budget} and {facts[0]['model']} only."
    return columns.side_by_side(title, records, note, own or rows, columns.ACCEPTED)


def figure(records: list[Record]) -> Figure:
    facts, rows, panels = published().acceptance, columns.rows_of(records), []
    for context in sorted({record["prefix_len"] for record in records}) or [facts[0]["prefix_len"]]:
        known = [fact for fact in facts if same_context(fact["prefix_len"], context)]
        own = [row for row in rows if row["prefix_len"] == context and row["draft_policy"] != "full"]
        curves = acceptance_curves(known, own, "draft_budget")
        panels.append(Panel(f"context of {context} tokens", "budget, KV entries", "acceptance rate", curves))
    return Figure("Acceptance by budget", panels)


@dataclass(frozen=True)
class Flags(reproduction.Acceptance):
    prefix_len: tuple[int, ...] = (4000,)  # prompt tokens per row
    draft_budget: tuple[int, ...] = (64, 128, 256, 512)  # KV entries of the draft


if __name__ == "__main__":
    cli.run_alone(reproduction.showing("acceptance_by_budget", table, figure), Flags)
