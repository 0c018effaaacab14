"""Speculation beside plain decoding, published and measured side by side, losses included: speedups by rows, context
and draft; what a verification and a draft step cost in plain steps; throughput against latency.

python reproduce/speedup_tables.py
python reproduce/speedup_tables.py --grid reproduce/grids/speedups_draft.toml --all
python reproduce/speedup_tables.py --fixed model=CHECKPOINT --axis B=32,64 --axis prefix_len=8000,32000 --axis gamma=3,4
"""

import common.startup

from bisect import bisect
from operator import itemgetter

from common import cli
from common.tables import Column
from reproduce.paper import columns, tables
from reproduce.paper.columns import COLUMNS, KINDS, over
from reproduce.paper.figures import BLACK, PUBLISHED, Figure, Key, Panel, Series, Style, lines
from reproduce.paper.published import SELF, Record, draft_name, grouped, pairs_of, published, target_name
from reproduce.paper.reproduction import SPEEDUPS, showing

SPEEDUP, COSTS = "Speedup over plain decoding", "Costs in steps of plain decoding"
FLOW = "Throughput against latency"
NOTE = f"""{columns.SLOWER}: slower than plain decoding. Measured: while all rows are busy, and to the last row; by the
  formula: what the published formula makes of the measured acceptance and step times. Figure 6 was read off a plot, to
  about 0.02; published ratios are theoretical, measured ones medians of timed rounds. Of throughput against latency no
  numbers are published: ms a token is what a row waits, tokens/s are of all rows while all are busy."""
WEIGHTS = COLUMNS["draft_weights"]
# viridis up to 0.9 of its range: also without colour vision the order can be seen.
SHADES = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
# The contexts that each next shade begins at.
LONGER = (1_500, 3_000, 6_000, 12_000, 20_000, 28_000, 48_000, 80_000)
FLOW_AXES = "ms per token of a row", "tokens per second of all rows"


def table(records: list[Record]) -> str:
    facts = tables.published_speedups(published().speedups, records)
    facts = facts._replace(columns=[Column("origin", "published of", align="<"), *facts.columns])
    own = (tables.of_runs(name, records) for name in ("speedups", "costs", "flow"))
    return tables.side_by_side(SPEEDUP, NOTE, facts, tables.published_ratios(records), *own)


def speedup_figure(records: list[Record]) -> Figure:
    """A panel for each published pair of models; measured self-speculation or draft models are in those like it."""
    panels = []
    for (target, draft), known in pairs_of(published().figure_6).items():
        own = [record for record in records if (draft_name(record) == SELF) == (draft == SELF)]
        panels.append(over_rows(f"published: {target}, {draft} draft", known, own, "speedup", "speedup"))
    return Figure(SPEEDUP, panels)


def cost_figure(records: list[Record]) -> Figure:
    panels = []
    for kind, facts in grouped(published().ratios, itemgetter("kind")).items():
        title = f"published: {facts[0]['model']}, {tables.AT.cell(facts[0])}, theoretical"
        panels.append(over_rows(title, facts, records, over(f"{kind}_step_ms"), KINDS[kind]))
    return Figure(COSTS, panels)


def over_rows(title: str, facts: list[Record], records: list[Record], y: Key, y_label: str) -> Panel:
    """Over the rows decoded together: a line for each context that was published, and each way to draft measured."""
    series = lines(facts, "published, {prefix_len} tokens".format_map, "B", "value", shade, style=PUBLISHED)
    series += lines(records, way, "B", y, shade)
    return Panel(title, "rows decoded together", y_label, series, is_speedup=y_label == "speedup")


def shade(row: Record) -> Style:
    """The darker the shorter the context, in every panel."""
    return {"color": SHADES[bisect(LONGER, row["prefix_len"])]}


def way(record: Record) -> str:
    """The target, and how it is drafted for."""
    draft = f"{draft_name(record)} draft in {WEIGHTS.cell(record)}"
    sizes = "{prefix_len} tokens, gamma {gamma}, budget {draft_budget}".format_map(record)
    return f"measured, {target_name(record)},\n{draft}, {sizes}"


def flow_figure(records: list[Record]) -> Figure:
    """A panel for each target and context; points are named by their rows."""
    groups = grouped(records, lambda record: (target_name(record), record["prefix_len"]))
    panels = [
        Panel(f"{target}, {context} tokens", *FLOW_AXES, _flow_series(own), is_log_x=False)
        for (target, context), own in sorted(groups.items(), key=itemgetter(0))
    ]
    return Figure(f"{FLOW} ({published().about['system']}: no published numbers recorded)", panels)


def _flow_series(records: list[Record]) -> list[Series]:
    plain = {record["B"]: record for record in reversed(records)}.values()
    axes, look = ("baseline_step_ms", "baseline_tokens_per_second"), {"color": BLACK, "marker": "v"}
    rows, rounds = "B {B}".format_map, over("round_ms", "mean_accepted_length")
    alone = lines(plain, lambda _: "measured, plain decoding", *axes, lambda _: look, rows)
    return alone + lines(records, way, rounds, "decode_tokens_per_second", name=rows)


FIGURES = {"speedup_tables": speedup_figure, "cost_ratios": cost_figure, "throughput_latency": flow_figure}

if __name__ == "__main__":
    cli.run_alone(*showing(SPEEDUPS, table, FIGURES))
