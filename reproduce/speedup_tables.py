"""Speedup over plain decoding by rows, context and draft, published and measured side by side, losses included.

python reproduce/speedup_tables.py
python reproduce/speedup_tables.py --model CHECKPOINT --B 32 64 128 --prefix_len 8000 32000 --gamma 3 4 --compile
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.tables import console
from reproduce.paper import columns, reproduction
from reproduce.paper.curves import by_rows, in_common
from reproduce.paper.figures import Figure, Panel, shades
from reproduce.paper.published import SELF, Record, draft_name, published
from reproduce.paper.reproduction import Speculation

NAME = "speedup_tables"


def table(records: list[Record]) -> str:
    facts = published().speedups
    origins = dict.fromkeys(fact.origin for fact in facts)
    known = [columns.published_column(origin, columns.published_speedup_text) for origin in origins]
    measured = replace(columns.COLUMNS["speedup"], head="measured"), "wall_speedup", "acceptance_rate", "formula"
    shown = columns.of(*columns.SETTING, *known, *measured)
    return (
        "  Speedup over plain decoding\n\n"
        f"{columns.differences(records)}\n"
        f"  {columns.SLOWER}: slower than plain decoding. Measured: over the rounds in which all rows are busy, "
        "and to the last row.\n  By the formula: what the published formula makes of the measured acceptance and step "
        "times.\n  Figure 6 was read off a plot, to about 0.02.\n\n" + console(columns.beside(records, facts), shown)
    )


def figure(records: list[Record]) -> Figure:
    """A panel for each published pair of models; measured self-speculation or draft models are in those like it."""
    facts = published().figure_6
    kept = [record for record in records if record.get("speedup") is not None]
    colours = shades([fact.context for fact in facts] + [record["prefix_len"] for record in kept])
    title = in_common(kept)
    panels = []
    for target, draft in dict.fromkeys((fact.target, fact.draft) for fact in facts):
        known = [fact for fact in facts if (fact.target, fact.draft) == (target, draft)]
        own = [record for record in kept if (draft_name(record) == SELF) == (draft == SELF)]
        series = by_rows(known, own, lambda record: record["speedup"], colours, title)
        name = f"published: {target}, {draft} draft"
        panels.append(Panel(name, "rows decoded together", "speedup", series, reference=(1, "plain decoding")))
    return Figure(f"Speedup over plain decoding\n{title}".strip(), tuple(panels))


def main(flags: Speculation) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, Speculation)
