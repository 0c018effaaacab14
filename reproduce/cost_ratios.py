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
from common.tables import Column
from reproduce.paper import columns, reproduction
from reproduce.paper.columns import KINDS, over
from reproduce.paper.figures import Figure, Pair, over_rows
from reproduce.paper.published import Record, published

TITLE = "Costs in steps of plain decoding"
FACTS = {kind: [fact for fact in published().ratios if fact["kind"] == kind] for kind in KINDS}


def table(records: list[Record]) -> str:
    rows = [
        row | {"kind": kind, "ratio": over(f"{kind}_step_ms")(row)}
        for kind, facts in FACTS.items()
        for row in columns.beside(records, facts)
    ]
    kind = Column("kind", "ratio", KINDS.__getitem__, align="<")
    shown = columns.of(kind, *columns.SETTING, "published", columns.measured("ratio", "measured", ".2f"))
    note = "The published ratios are theoretical and were read off figures; measured ones are medians of timed rounds."
    return columns.side_by_side(TITLE, records, note, rows, shown)


def figure(records: list[Record]) -> Figure:
    pairs = []
    for kind, facts in FACTS.items():
        at = f"gamma {facts[0]['gamma']}" if facts[0]["gamma"] else f"budget {facts[0]['draft_budget']}"
        title = f"published: {facts[0]['model']}, {at}, theoretical"
        pairs.append(Pair(title, facts, records, over(f"{kind}_step_ms"), KINDS[kind]))
    return over_rows(TITLE, pairs)


if __name__ == "__main__":
    cli.run_alone(reproduction.showing("cost_ratios", table, figure), reproduction.Speculation)
