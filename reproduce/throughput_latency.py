"""Throughput against latency of plain decoding and of speculation, from few rows at a time to many.

    python reproduce/throughput_latency.py
    python reproduce/throughput_latency.py --model CHECKPOINT --B 1 4 16 64 --prefix_len 16000 --compile

Runs the cells of speedup_tables.py: what one of them has measured the other does not measure again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.tables import console
from reproduce.paper import columns, reproduction
from reproduce.paper.figures import BLACK, Figure, Panel, lines
from reproduce.paper.published import Record, draft_name, published, target_name
from reproduce.paper.reproduction import Speculation

NAME = "throughput_latency"
AXES = "ms per token of a row", "tokens per second of all rows"


def table(records: list[Record]) -> str:
    return (
        "  Throughput against latency\n\n"
        f"{columns.differences(records)}\n"
        "  Published: a figure; no numbers of it are recorded here, so there is nothing to set beside these.\n"
        "  ms a token: what a row waits for a token; tokens/s: all rows together, while all are busy.\n\n"
        + console(sorted(records, key=columns.by_size), [*columns.SETTING, *columns.FLOW])
    )


def figure(records: list[Record]) -> Figure:
    """A panel for each target and context; points are named by their rows."""
    panels = []
    for target, context in sorted({(target_name(record), record["prefix_len"]) for record in records}):
        own = [record for record in records if (target_name(record), record["prefix_len"]) == (target, context)]
        plain = {record["B"]: record for record in reversed(own)}
        series = lines(
            plain.values(),
            lambda record: "measured, plain decoding",
            lambda record: record.get("baseline_step_ms"),
            lambda record: record.get("baseline_tokens_per_second"),
            lambda record: BLACK,
            "v",
            name=_rows,
        ) + lines(
            own,
            lambda r: f"measured, {draft_name(r)} drafts, gamma {r['gamma']}, budget {r['draft_budget']}",
            columns.ms_per_token,
            lambda record: record.get("decode_tokens_per_second"),
            name=_rows,
        )
        panels.append(Panel(f"{target}, {context} tokens", *AXES, tuple(series), is_log_x=False))
    title = f"Throughput against latency ({published().system}: no published numbers recorded)"
    return Figure(title, tuple(panels) or (Panel("nothing measured", *AXES, (), is_log_x=False),))


def _rows(record: Record) -> str:
    return f"B {record['B']}"


def main(flags: Speculation) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, Speculation)
