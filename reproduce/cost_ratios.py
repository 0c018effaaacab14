"""What a verification and a draft step cost in steps of plain decoding, published and measured side by side.

    python reproduce/cost_ratios.py
    python reproduce/cost_ratios.py --load_format dummy --model_name meta-llama/Meta-Llama-3.1-8B --gamma 4

Runs the cells of speedup_tables.py: what one of them has measured the other does not measure again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.tables import Column, console
from reproduce.paper import columns, reproduction
from reproduce.paper.columns import KINDS, over_plain_step
from reproduce.paper.curves import by_rows, in_common
from reproduce.paper.figures import Figure, Panel, shades
from reproduce.paper.published import Fact, Record, published
from reproduce.paper.reproduction import Speculation

NAME = "cost_ratios"


def facts_of(kind: str) -> list[Fact]:
    return [fact for fact in published().ratios if fact.what == kind]


def table(records: list[Record]) -> str:
    rows = [
        row | {"kind": kind, "ratio": over_plain_step(kind)(row)}
        for kind in KINDS
        for row in columns.beside(records, facts_of(kind))
    ]
    kind = Column("kind", "ratio", KINDS.__getitem__, align="<")
    measured = columns.measured("ratio", "measured", ".2f")
    return (
        "  Costs in steps of plain decoding\n\n"
        f"{columns.differences(records)}\n"
        "  The published ratios are theoretical and were read off figures; measured ones are medians of timed "
        f"rounds.\n\n{console(rows, [kind, *columns.SETTING, columns.published_column(), measured])}"
    )


def figure(records: list[Record]) -> Figure:
    colours = shades([fact.context for fact in published().ratios] + [record["prefix_len"] for record in records])
    title = in_common(records)
    panels = []
    for kind, label in KINDS.items():
        facts = facts_of(kind)
        at = f"gamma {facts[0].gamma}" if facts[0].gamma else f"budget {facts[0].budget}"
        series = by_rows(facts, records, over_plain_step(kind), colours, title)
        panels.append(Panel(f"published: {facts[0].target}, {at}, theoretical", "rows decoded together", label, series))
    return Figure(f"Costs in steps of plain decoding\n{title}".strip(), tuple(panels))


def main(flags: Speculation) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, Speculation)
