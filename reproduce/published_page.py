"""reproduce/README.md, generated from pages/published.md, the published facts and the records in reproduce/results/.

    python reproduce/published_page.py            # write the page
    python reproduce/published_page.py --check    # exit code 1 if the committed page is another one

What was measured on a published model, what was measured on the built-in one, and what is only predicted from
measured costs stand in columns of their own; what has no record is "not measured".
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import numpy as np

from common import cli
from common.checkout import ROOT
from common.tables import Column, markdown
from engine.bench.config import AUTO
from engine.bench.cost_tables import cost_columns
from reproduce import cost_model_error, roofline_error
from reproduce.pages.generated_page import GPU, RESULTS, Flags, absent, filled, read, source, table
from reproduce.pages.published_tables import Records, measured_speedup, published_tables
from reproduce.paper import auto_against_fixed, columns, cpu_roofline
from reproduce.paper.columns import FLOW, NONE, SETTING, STEPS, by_size, machine_name, of
from reproduce.paper.published import Record, published
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


def page(folder: Path = RESULTS, figures: Path = FIGURES) -> str:
    gpu = [record for record in read(folder, GPU, "gpu_costs") if record.get("status") == "done"]
    runs = [*swept(folder, SPEEDUPS), *gpu]
    runs = [run for run in runs if isinstance(run.get("gamma"), int) and run.get("draft_budget") != AUTO]
    speculation = [run for run in runs if run.get("load_format") != "dummy"]
    costs = [run for run in runs if run.get("load_format") == "dummy"]
    records = Records(speculation, costs, columns.rows_of(swept(folder, ACCEPTANCE)))
    machines = dict.fromkeys(map(machine_name, [*runs, *records.acceptance]))
    is_published = any(measured_speedup(records, fact) != NONE for fact in published().speedups)
    drawn = {file.stem: f"![{file.stem.replace('_', ' ')}](figures/{file.name})\n\n" for file in figures.glob("*.svg")}
    values = {
        "machines": ", ".join(machines) or NONE,
        "is_published": "published models" if is_published else "no published model",
        "facts": published(),
        "make_draft": MAKE_DRAFT,
        "figures": defaultdict(str, drawn),
    }
    values |= published_tables(records) | roofline_tables(read(folder, roofline_error.ROOFLINE, "cpu_roofline"))
    return filled("published.md", values | measured_tables(records) | cost_model_tables(swept(folder, COST_MODEL)))


def swept(folder: Path, name: str) -> list[Record]:
    """What was measured: rows of cells that went well. Each record says in `file` where it is."""
    rows = read_rows(folder / name).values()
    return [row["record"] | {"file": name} for row in rows if row["status"] == OK]


def roofline_tables(cpu: Sequence[Record]) -> dict[str, str]:
    """How far off predictions from data sheets are, by which constant, and on this CPU."""
    rows = cpu[-1]["rows"] if cpu else ()
    return {
        "roofline_summary": roofline_error.summary(),
        "cpu_summary": cpu_roofline.summary(cpu) if cpu else f"{NONE} where both could be compared",
        "roofline_errors": markdown(roofline_error.errors(), roofline_error.ERRORS),
        "roofline_constants": markdown(roofline_error.constants(), roofline_error.LEFT),
        "roofline_on_cpu": table("The roofline on a CPU", cpu[-1:], ON_CPU, roofline_error.ROOFLINE, rows),
    }


def measured_tables(records: Records) -> dict[str, str]:
    speculation = sorted(records.speculation, key=by_size)
    costs = sorted([*speculation, *(run for run in records.costs if run["file"] == SPEEDUPS)], key=by_size)
    order = itemgetter("text", "draft_policy")
    rows = sorted(records.acceptance, key=lambda row: (*by_size(row)[:3], *order(row), row["draft_budget"] or 0))
    return {
        "speedups": table("Speedup", speculation, SPEEDUP, SPEEDUPS),
        "costs": table("Costs", costs, of(*RUN, *STEPS, "verify / plain", "draft / plain"), SPEEDUPS),
        "flow": table("Throughput against latency", speculation, [*RUN, *FLOW], SPEEDUPS),
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
    cli.run_alone(lambda flags: flags.write_or_check(PAGE, page()), Flags)
