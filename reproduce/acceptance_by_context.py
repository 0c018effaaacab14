"""Acceptance of self-speculation by the length of the context, published and measured side by side.

python reproduce/acceptance_by_context.py
python reproduce/acceptance_by_context.py --model CHECKPOINT --prefix_len 4000 8000 16000 32000
"""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from reproduce.paper import reproduction
from reproduce.paper.figures import BLACK, CATEGORIES, MARKERS, Figure, Panel, Series
from reproduce.paper.published import SELF, Acceptance, published, same_context
from reproduce.paper.reproduction import NONE, Record, Sizes, number, published_text, side_by_side

NAME = "acceptance_by_context"
SIZES = Sizes(gen_len=128, B=(4,), prefix_len=(1000, 2000, 4000))
HEAD = ["target", "context", "budget", "policy", "text", "published", "measured", "judged", "distinct 4-grams"]


def rows_of(records: Iterable[Record]) -> list[Record]:
    """A record for each text, policy and budget, with the settings of the run that it comes from."""
    return [{**record, **row} for record in records for row in record["rows"]]


def published_alpha(row: Record) -> float | None:
    """What was published for this context, if the row is of self-speculation with the published policy and budget."""
    facts = published()
    is_same = (row["draft_policy"], row["draft_budget"]) == (facts.draft_policy, facts.draft_budget)
    if not is_same or reproduction.draft_name(row) != SELF:
        return None
    matching = [fact.alpha for fact in facts.acceptance if same_context(fact.context, row["prefix_len"])]
    return matching[0] if matching else None


def line(row: Record) -> list[str]:
    alpha = published_alpha(row)
    return [
        reproduction.target_name(row),
        str(row["prefix_len"]),
        "all" if row["draft_policy"] == "full" else str(row["draft_budget"]),
        row["draft_policy"],
        row["text"],
        "-" if alpha is None else published_text(alpha),
        number(row["acceptance_rate"], 3),
        str(row["judged"]),
        number(row.get("distinct_4gram_fraction")),
    ]


def unmeasured(fact: Acceptance) -> list[str]:
    facts = published()
    place = [fact.target, str(fact.context), str(facts.draft_budget), facts.draft_policy]
    return [*place, "-", published_text(fact.alpha), NONE, "-", "-"]


def table(records: list[Record]) -> str:
    rows = rows_of(records)
    facts = published()
    found = [((row["prefix_len"], row["draft_budget"] or 0), line(row)) for row in rows]
    for fact in facts.acceptance:
        if not any(published_alpha(row) is not None and same_context(row["prefix_len"], fact.context) for row in rows):
            found.append(((fact.context, facts.draft_budget), unmeasured(fact)))
    lines = [shown for _, shown in sorted(found, key=lambda pair: pair[0])]
    models = " and ".join(dict.fromkeys(fact.target for fact in facts.acceptance))
    return (
        "  Acceptance rate of self-speculation by context\n\n"
        f"{reproduction.differences(records)}\n  The published model is {models}.\n\n{side_by_side(HEAD, lines)}"
    )


def curves(rows: list[Record], x: str) -> tuple[Series, ...]:
    """One for each model, policy and text; a colour is a policy, a marker a text."""
    groups: dict[tuple, list[Record]] = {}
    known = [row for row in rows if row["acceptance_rate"] is not None and row[x] is not None]
    for row in sorted(known, key=lambda row: row[x]):
        groups.setdefault((row["model"], row["draft_policy"], row["text"]), []).append(row)
    several = len({key[0] for key in groups}) > 1
    return tuple(
        Series(
            f"measured, {f'{model}, ' if several else ''}{policy}, {text}",
            [row[x] for row in group],
            [row["acceptance_rate"] for row in group],
            CATEGORIES[reproduction.POLICIES.index(policy)],
            marker=MARKERS[reproduction.TEXTS.index(text)],
        )
        for (model, policy, text), group in groups.items()
    )


def figure(records: list[Record]) -> Figure:
    facts = published().acceptance
    label = f"published, {facts[0].target}, {published().draft_policy}"
    points = Series(label, [fact.context for fact in facts], [fact.alpha for fact in facts], BLACK, True)
    budget = published().draft_budget
    # One budget in this figure: the published one, or else the first that was measured.
    rows = rows_of(records)
    budgets = [row["draft_budget"] for row in rows if row["draft_budget"] is not None]
    shown = budget if budget in budgets or not budgets else budgets[0]
    kept = [row for row in rows if row["draft_policy"] == "full" or row["draft_budget"] == shown]
    title = f"published: budget {budget}; measured: budget {shown}"
    panel = Panel(title, "context, tokens", "acceptance rate", (points, *curves(kept, "prefix_len")))
    return Figure("Acceptance by context", (panel,))


def main() -> None:
    args = reproduction.acceptance_parser(__doc__.splitlines()[0], SIZES).parse_args()
    reproduction.present(args, reproduction.acceptance_cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
