"""Speculation beside plain decoding, published and measured side by side, losses included: speedups by rows, context
and draft; what a verification and a draft step cost in plain steps; throughput against latency.

python reproduce/speedup_tables.py
python reproduce/speedup_tables.py --grid reproduce/grids/speedups_draft.toml --all
python reproduce/speedup_tables.py --fixed model=CHECKPOINT --axis B=32,64 --axis prefix_len=8000,32000 --axis gamma=3,4
"""

from operator import itemgetter

from common import cli
from common.tables import Column
from reproduce.paper import columns, tables
from reproduce.paper.columns import KINDS, over
from reproduce.paper.figures import BLACK, Figure, Panel, Series, lines, over_rows
from reproduce.paper.published import SELF, Record, draft_name, grouped, pairs_of, published, target_name
from reproduce.paper.reproduction import SPEEDUPS, showing

SPEEDUP, COSTS = "Speedup over plain decoding", "Costs in steps of plain decoding"
FLOW = "Throughput against latency"
NOTE = f"""{columns.SLOWER}: slower than plain decoding. Measured: while all rows are busy, and to the last row; by the
  formula: what the published formula makes of the measured acceptance and step times. Figure 6 was read off a plot, to
  about 0.02; published ratios are theoretical, measured ones medians of timed rounds. Of throughput against latency no
  numbers are published: ms a token is what a row waits, tokens/s are of all rows while all are busy."""
FLOW_AXES = "ms per token of a row", "tokens per second of all rows"


def table(records: list[Record]) -> str:
    facts = tables.published_speedups(published().speedups, records)
    facts = facts._replace(columns=[Column("origin", "published of", align="<"), *facts.columns])
    own = (tables.of_runs(name, records) for name in ("speedups", "costs", "flow"))
    return tables.side_by_side(SPEEDUP, NOTE, facts, tables.published_ratios(records), *own)


def speedup_figure(records: list[Record]) -> Figure:
    """A panel for each published pair of models; measured self-speculation or draft models are in those like it."""
    pairs, measured = [], [record for record in records if record.get("speedup") is not None]
    for (target, draft), known in pairs_of(published().figure_6).items():
        own = [record for record in measured if (draft_name(record) == SELF) == (draft == SELF)]
        pairs.append((f"published: {target}, {draft} draft", known, own, "speedup", "speedup"))
    return over_rows(SPEEDUP, pairs)


def cost_figure(records: list[Record]) -> Figure:
    pairs = []
    for kind, facts in grouped(published().ratios, itemgetter("kind")).items():
        title = f"published: {facts[0]['model']}, {tables.AT.cell(facts[0])}, theoretical"
        pairs.append((title, facts, records, over(f"{kind}_step_ms"), KINDS[kind]))
    return over_rows(COSTS, pairs)


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

    def label(record: Record) -> str:
        return f"measured, {draft_name(record)} drafts, gamma {record['gamma']}, budget {record['draft_budget']}"

    alone = lines(plain, lambda _: "measured, plain decoding", *axes, lambda _: look, rows)
    return alone + lines(records, label, rounds, "decode_tokens_per_second", name=rows)


FIGURES = {"speedup_tables": speedup_figure, "cost_ratios": cost_figure, "throughput_latency": flow_figure}

if __name__ == "__main__":
    cli.run_alone(*showing(SPEEDUPS, table, FIGURES))
