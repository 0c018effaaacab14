"""Acceptance of self-speculation by the budget of the draft's cache, published and measured side by side.

python reproduce/acceptance_by_budget.py
python reproduce/acceptance_by_budget.py --model CHECKPOINT --prefix_len 16000 --draft_budget 64 128 256 512 1024
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from reproduce.acceptance_by_context import HEAD, curves, line, rows_of, unmeasured
from reproduce.paper import reproduction
from reproduce.paper.figures import BLACK, Figure, Panel, Series
from reproduce.paper.published import published, same_context
from reproduce.paper.reproduction import Record, Sizes, side_by_side

NAME = "acceptance_by_budget"
SIZES = Sizes(gen_len=128, B=(4,), prefix_len=(4000,), draft_budget=(64, 128, 256, 512))


def table(records: list[Record]) -> str:
    facts = published()
    rows = sorted(
        rows_of(records),
        key=lambda row: (row["prefix_len"], row["draft_policy"], row["text"], row["draft_budget"] or 0),
    )
    lines = [line(row) for row in rows]
    if not rows:
        lines = [unmeasured(fact) for fact in facts.acceptance]
    return (
        "  Acceptance rate of self-speculation by budget\n\n"
        f"{reproduction.differences(records)}\n"
        f"  Published numbers are for a budget of {facts.draft_budget} and {facts.acceptance[0].target} only.\n\n"
        + side_by_side(HEAD, lines)
    )


def figure(records: list[Record]) -> Figure:
    facts = published()
    contexts = sorted({record["prefix_len"] for record in records}) or [facts.acceptance[0].context]
    panels = []
    for context in contexts:
        alphas = [fact.alpha for fact in facts.acceptance if same_context(fact.context, context)]
        points = Series(
            f"published, {facts.acceptance[0].target}, {facts.draft_policy}",
            [facts.draft_budget] * len(alphas),
            alphas,
            BLACK,
            is_published=True,
        )
        own = [row for row in rows_of(records) if row["prefix_len"] == context and row["draft_policy"] != "full"]
        series = (*([points] if alphas else []), *curves(own, "draft_budget"))
        panels.append(Panel(f"context of {context} tokens", "budget, KV entries", "acceptance rate", series))
    return Figure("Acceptance by budget", tuple(panels))


def main() -> None:
    args = reproduction.acceptance_parser(__doc__.splitlines()[0], SIZES).parse_args()
    reproduction.present(args, reproduction.acceptance_cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
