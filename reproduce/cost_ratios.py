"""What a verification and a draft step cost in steps of plain decoding, published and measured side by side.

    python reproduce/cost_ratios.py
    python reproduce/cost_ratios.py --load_format dummy --model_name meta-llama/Meta-Llama-3.1-8B --gamma 4

Runs the cells of speedup_tables.py: what one of them has measured the other does not measure again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from reproduce.paper import reproduction
from reproduce.paper.figures import Figure, Panel, shades
from reproduce.paper.published import SELF, Ratio, published, same_context
from reproduce.paper.reproduction import NONE, Record, Sizes, number, published_text, quotient, side_by_side
from reproduce.speedup_tables import measured_series, published_series, shared

NAME = "cost_ratios"
SIZES = Sizes()
KINDS = {"verify": "verification / plain step", "draft": "draft step / plain step"}


def ratio_of(record: Record, kind: str) -> float | None:
    return quotient(record, f"{kind}_step_ms")


def is_same(fact: Ratio, record: Record) -> bool:
    """Whether the record measured the very setting of the published ratio."""
    return (
        published().is_model(fact.target, record.get("model"))
        and reproduction.draft_name(record) == SELF
        and record["B"] == fact.B
        and same_context(record["prefix_len"], fact.context)
        and fact.gamma in (None, record["gamma"])
        and fact.budget in (None, record.get("draft_budget"))
    )


def table(records: list[Record]) -> str:
    head = ["ratio", "target", "draft", "context", "rows", "gamma", "budget", "published", "measured"]
    parts = []
    for kind, title in KINDS.items():
        found = []
        facts = [fact for fact in published().ratios if fact.kind == kind]
        for record in records:
            known = [fact.ratio for fact in facts if is_same(fact, record)]
            place = [reproduction.target_name(record), reproduction.draft_name(record)]
            size = [str(record[key]) for key in ("prefix_len", "B", "gamma", "draft_budget")]
            shown = [published_text(known[0]) if known else "-", number(ratio_of(record, kind))]
            found.append(((*place, record["prefix_len"], record["B"]), [title, *place, *size, *shown]))
        for fact in facts:
            if not any(is_same(fact, record) for record in records):
                size = [str(fact.context), str(fact.B), str(fact.gamma or "-"), str(fact.budget or "-")]
                shown = [title, fact.target, SELF, *size, published_text(fact.ratio), NONE]
                found.append(((fact.target, SELF, fact.context, fact.B), shown))
        parts += [shown for _, shown in sorted(found, key=lambda pair: pair[0])]
    return (
        "  Costs in steps of plain decoding\n\n"
        f"{reproduction.differences(records)}\n"
        "  The published ratios are theoretical and were read off figures; measured ones are medians of timed "
        f"rounds.\n\n{side_by_side(head, parts)}"
    )


def figure(records: list[Record]) -> Figure:
    colours = shades([fact.context for fact in published().ratios] + [record["prefix_len"] for record in records])
    common = shared(records)
    panels = []
    for kind, title in KINDS.items():
        facts = [fact for fact in published().ratios if fact.kind == kind]
        own = [record | {"ratio": ratio_of(record, kind)} for record in records]
        series = [*published_series(facts, "ratio", colours), *measured_series(own, "ratio", colours, common)]
        fact = facts[0]
        at = f"gamma {fact.gamma}" if fact.gamma else f"budget {fact.budget}"
        title_ = f"published: {fact.target}, {at}, theoretical"
        panels.append(Panel(title_, "rows decoded together", title, tuple(series)))
    return Figure(f"Costs in steps of plain decoding\n{common}".strip(), tuple(panels))


def main() -> None:
    args = reproduction.speculation_parser(__doc__.splitlines()[0], SIZES).parse_args()
    reproduction.present(args, reproduction.speculation_cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
