"""Writes reproduce/README.md from pages/published.md, the published facts and the records in reproduce/results/.

    python reproduce/published_page.py

What was measured and what is only predicted stand in columns of their own; what has no record is "not measured".
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import numpy as np

from common import cli
from common.checkout import ROOT
from common.tables import Column, markdown
from engine.bench.config import AUTO
from engine.bench.cost_tables import cost_columns
from models.checkpoints.default_model import DEFAULT_NAME
from reproduce import cost_model_error, roofline_error
from reproduce.pages.generated_page import GPU, RESULTS, NoFlags, absent, filled, link, read, source, table, write
from reproduce.paper import auto_against_fixed, columns, cpu_roofline
from reproduce.paper.columns import FLOW, NONE, SETTING, STEPS, by_size, machine_name, of, over, speedup_text
from reproduce.paper.predicted import is_acceptance_known, predict
from reproduce.paper.published import Record, is_of, is_setting_of, pairs_of, published
from reproduce.paper.reproduction import ACCEPTANCE, COST_MODEL, MAKE_DRAFT, SPEEDUPS
from reproduce.sweeping.runner import OK, read_rows

PAGE, FIGURES = ROOT / "reproduce" / "README.md", ROOT / "reproduce" / "figures"
RUN = of(*SETTING, "draft_weights")
SPEEDUP = of(*RUN, "speedup", "wall_speedup", "formula", "acceptance_rate", "mean_accepted_length", "identical")
SPEEDUP += of("distinct_4gram_fraction")
ACCEPTED = of(*columns.ACCEPTANCE, "acceptance_rate", "acceptance_per_position", "judged", "mean_accepted_length")
ACCEPTED += of("distinct_4gram_fraction")
ERROR = Column(lambda row: row["predicted_ms"] / row["measured_ms"] - 1, "error", "+.0%")
ON_CPU = of("B", "prefix_len", "cost", "predicted_ms", "measured_ms", ERROR)


MEASURED = "measured on the same model"
TARGET, DRAFT, CONTEXT, ROWS = of("target", "draft", "prefix_len", "B")
VALUE = Column("value", "published", columns.published_text)


def page(folder: Path = RESULTS, figures: Path = FIGURES) -> str:
    gpu = [record for record in read(folder, GPU, "gpu_costs") if record.get("status") == "done"]
    runs = [*swept(folder, SPEEDUPS), *gpu]
    runs = [run for run in runs if isinstance(run.get("gamma"), int) and run.get("draft_budget") != AUTO]
    speculation = [run for run in runs if run.get("load_format") != "dummy"]
    acceptance = columns.rows_of(swept(folder, ACCEPTANCE))
    machines = dict.fromkeys(map(machine_name, [*runs, *acceptance]))
    is_published = any(is_of(fact, run) for fact in published().speedups for run in speculation)
    drawn = {file.stem: f"![{file.stem.replace('_', ' ')}](figures/{file.name})\n\n" for file in figures.glob("*.svg")}
    values = {
        "machines": ", ".join(machines) or NONE,
        "is_published": "published models" if is_published else "no published model",
        "facts": published(),
        "make_draft": MAKE_DRAFT,
        "figures": defaultdict(str, drawn),
    }
    values |= published_tables(speculation, runs, acceptance)
    values |= roofline_tables(read(folder, roofline_error.ROOFLINE, "cpu_roofline"))
    values |= measured_tables(speculation, [run for run in runs if run["file"] == SPEEDUPS], acceptance)
    return filled("published.md", values | cost_model_tables(swept(folder, COST_MODEL)))


def swept(folder: Path, name: str) -> list[Record]:
    """What was measured: rows of cells that went well. Each record says in `file` where it is."""
    rows = read_rows(folder / name).values()
    return [row["record"] | {"file": name} for row in rows if row["status"] == OK]


def published_tables(
    speculation: Sequence[Record], runs: Sequence[Record], acceptance: Sequence[Record]
) -> dict[str, Any]:
    """All published numbers, and beside each what is predicted and what was measured of the same. runs: also those
    with random weights, which measure costs.
    """
    facts, built_in = published(), [row for row in acceptance if row["model"] == DEFAULT_NAME]
    gamma = Column("gamma", "gamma", missing="not shown")
    value = Column("value", "published", columns.published_speedup_text)
    speedup = beside(MEASURED, speculation, itemgetter("speedup"), speedup_text)
    speedups = [TARGET, DRAFT, CONTEXT, ROWS, gamma, value, BY_ROOFLINE, speedup]
    rate, shown = itemgetter("acceptance_rate"), "{:.3f}".format
    near = beside("same context on the built-in model", built_in, rate, shown, is_setting_of)
    accepted = [TARGET, DRAFT, CONTEXT, VALUE, beside(MEASURED, acceptance, rate, shown), near]
    kind = Column("kind", "ratio", columns.KINDS.get, align="<")
    of_draft = [run for run in runs if has_plain_draft(run)]
    ratios = {
        "verify": beside("measured on the same shape", runs, over("verify_step_ms"), "{:.2f}".format),
        "draft": beside("measured on the same shape", of_draft, over("draft_step_ms"), "{:.2f}".format),
    }
    measured = Column(lambda fact: ratios[fact["kind"]].cell(fact), "measured on the same shape", align="<")
    return {
        "by_machine": {machine: markdown(own, speedups) for machine, own in facts.by_machine.items()},
        "by_pair": {", ".join(pair): markdown(own, speedups) for pair, own in pairs_of(facts.figure_6).items()},
        "acceptance_by_context": markdown(facts.acceptance, accepted),
        "ratios": markdown(facts.ratios, [kind, TARGET, AT, CONTEXT, ROWS, VALUE, BY_ROOFLINE, measured]),
    }


def beside(
    head: str,
    records: Sequence[Record],
    value: Callable[[Record], Any],
    show: Callable[[Any], str],
    counts: Callable[[Record, Record], bool] = is_of,
) -> Column:
    """What was measured of each published number: values, each linked to its record, and its setting."""

    def listed(fact: Record) -> str:
        found = [record for record in records if counts(fact, record) and value(record) is not None]
        return "; ".join(f"{link(show(value(one)), one)} ({details(one)})" for one in found) or NONE

    return Column(listed, head, align="<")


def details(record: Record) -> str:
    if "text" in record:
        return f"{record['text']} text, {machine_name(record)}"
    weights = "random weights, " if record.get("load_format") == "dummy" else ""
    kv = record.get("kv_dtype")
    own = f", {kv} KV" if kv and kv != record.get("dtype") else ""
    return f"{weights}{machine_name(record)}, gamma {record['gamma']}, {record['prefix_len']} tokens{own}"


def has_plain_draft(record: Record) -> bool:
    """Whether the draft's weights are stored as the target's, as in what was published."""
    return record.get("draft_weights") in (None, "same") and record.get("draft_dtype") == record.get("dtype")


def by_roofline(fact: Record) -> str:
    """What data sheets predict, and how far that is off; marked where the acceptance is assumed."""
    value, is_ratio = predict(fact), "kind" in fact
    mark = "" if is_ratio or is_acceptance_known(fact) else "?"
    return f"{f'{value:.2f}' if is_ratio else speedup_text(value)}{mark} ({value / fact['value'] - 1:+.0%})"


BY_ROOFLINE = Column(by_roofline, "predicted by the roofline (error)", align="<")
AT = Column(
    lambda fact: f"gamma {fact['gamma']}" if fact["gamma"] else f"budget {fact['draft_budget']}", "at", align="<"
)


def roofline_tables(cpu: Sequence[Record]) -> dict[str, str]:
    """How far off predictions from data sheets are, by which constant, and on this CPU."""
    rows = cpu[-1]["rows"] if cpu else ()
    return {
        "roofline_summary": roofline_error.summary(),
        "cpu_summary": cpu_roofline.summary(cpu) if cpu else f"{NONE} where both could be compared",
        "roofline_errors": markdown(roofline_error.errors(), roofline_error.ERRORS),
        "roofline_on_cpu": table("The roofline on a CPU", cpu[-1:], ON_CPU, roofline_error.ROOFLINE, rows),
    }


def measured_tables(
    speculation: Sequence[Record], runs: Sequence[Record], acceptance: Sequence[Record]
) -> dict[str, str]:
    own, costs = sorted(speculation, key=by_size), sorted(runs, key=by_size)
    order = itemgetter("text", "draft_policy")
    rows = sorted(acceptance, key=lambda row: (*by_size(row)[:3], *order(row), row["draft_budget"] or 0))
    return {
        "speedups": table("Speedup", own, SPEEDUP, SPEEDUPS),
        "costs": table("Costs", costs, of(*RUN, *STEPS, "verify / plain", "draft / plain"), SPEEDUPS),
        "flow": table("Throughput against latency", own, [*RUN, *FLOW], SPEEDUPS),
        "acceptance": table("Acceptance", rows, ACCEPTED, ACCEPTANCE),
    }


def cost_model_tables(records: Sequence[Record]) -> dict[str, str]:
    """Predicted beside measured speedups, and `--gamma auto` beside fixed gammas."""
    compared = cost_model_error.comparisons(records)
    grids = [cost_model_error.grid_of(record) for record in records if record["benchmark"] == "cost_model"]
    return {
        "cost_error": cost_model_error.error_summary(compared).capitalize(),
        "cost_grids": "\n\n".join(markdown(np.ndindex(grid.plain.shape), cost_columns(grid)) for grid in grids) or NONE,
        "cost_errors": markdown(compared, cost_model_error.ERRORS) if compared else NONE,
        "modes": "".join(f"{auto_against_fixed.section_of(mode, records)}\n\n" for mode in auto_against_fixed.MODES),
        "cost_source": source(records) if records else absent("The cost model", COST_MODEL),
    }


if __name__ == "__main__":
    cli.run_alone(lambda flags: write(PAGE, page()), NoFlags)
