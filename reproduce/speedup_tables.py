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
from common.tables import Column
from reproduce.paper import columns, reproduction
from reproduce.paper.figures import Figure, Pair, over_rows
from reproduce.paper.published import SELF, Record, draft_name, pairs_of, published

TITLE = "Speedup over plain decoding"
NOTE = (
    f"{columns.SLOWER}: slower than plain decoding. Measured: over the rounds in which all rows are busy, and to the "
    "last row.\n  By the formula: what the published formula makes of the measured acceptance and step times.\n"
    "  Figure 6 was read off a plot, to about 0.02."
)


def table(records: list[Record]) -> str:
    facts = published().speedups
    origins = dict.fromkeys(fact["origin"] for fact in facts)
    known = [Column(origin, origin, columns.published_speedup_text) for origin in origins]
    measured = replace(columns.COLUMNS["speedup"], head="measured"), "wall_speedup", "acceptance_rate", "formula"
    shown = columns.of(*columns.SETTING, *known, *measured)
    return columns.side_by_side(TITLE, records, NOTE, columns.beside(records, facts), shown)


def figure(records: list[Record]) -> Figure:
    """A panel for each published pair of models; measured self-speculation or draft models are in those like it."""
    pairs = []
    for (target, draft), known in pairs_of(published().figure_6).items():
        own = [record for record in records if (draft_name(record) == SELF) == (draft == SELF)]
        own = [record for record in own if record.get("speedup") is not None]
        pairs.append(Pair(f"published: {target}, {draft} draft", known, own, "speedup", "speedup"))
    return over_rows(TITLE, pairs)


if __name__ == "__main__":
    cli.run_alone(reproduction.showing("speedup_tables", table, figure), reproduction.Speculation)
