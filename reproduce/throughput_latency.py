"""Throughput against latency of plain decoding and of speculation, from few rows at a time to many.

    python reproduce/throughput_latency.py
    python reproduce/throughput_latency.py --model CHECKPOINT --B 1 4 16 64 --prefix_len 16000 --compile

Runs the cells of speedup_tables.py: what one of them has measured the other does not measure again.
"""

import sys
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from reproduce.paper import columns, reproduction
from reproduce.paper.figures import BLACK, Figure, Panel, Series, lines
from reproduce.paper.published import Record, draft_name, grouped, published, target_name

AXES = "ms per token of a row", "tokens per second of all rows"
NOTE = """Published: a figure; no numbers of it are recorded here, so there is nothing to set beside these.
  ms a token: what a row waits for a token; tokens/s: all rows together, while all are busy."""


def table(records: list[Record]) -> str:
    rows = sorted(records, key=columns.by_size)
    return columns.side_by_side("Throughput against latency", records, NOTE, rows, [*columns.SETTING, *columns.FLOW])


def figure(records: list[Record]) -> Figure:
    """A panel for each target and context; points are named by their rows."""
    groups = grouped(records, lambda record: (target_name(record), record["prefix_len"]))
    panels = [
        Panel(f"{target}, {context} tokens", *AXES, _series(own), is_log_x=False)
        for (target, context), own in sorted(groups.items(), key=itemgetter(0))
    ]
    title = f"Throughput against latency ({published().about['system']}: no published numbers recorded)"
    return Figure(title, panels or [Panel("nothing measured", *AXES, [], is_log_x=False)])


def _series(records: list[Record]) -> list[Series]:
    plain = {record["B"]: record for record in reversed(records)}.values()
    flow, look = ("baseline_step_ms", "baseline_tokens_per_second"), {"color": BLACK, "marker": "v"}
    rows, rounds = "B {B}".format_map, columns.over("round_ms", "mean_accepted_length")

    def label(record: Record) -> str:
        return f"measured, {draft_name(record)} drafts, gamma {record['gamma']}, budget {record['draft_budget']}"

    alone = lines(plain, lambda _: "measured, plain decoding", *flow, lambda _: look, rows)
    return alone + lines(records, label, rounds, "decode_tokens_per_second", name=rows)


if __name__ == "__main__":
    cli.run_alone(reproduction.showing("throughput_latency", table, figure), reproduction.Speculation)
