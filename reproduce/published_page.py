"""Writes reproduce/README.md from pages/published.md, the published facts and the records in reproduce/results/.

    python reproduce/published_page.py

What was measured and what is only predicted stand in columns of their own; what has no record is "not measured".
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from bench.config import AUTO
from common import cli
from common.checkout import ROOT
from common.tables import Column, markdown
from cost_model.tables import cost_table
from reproduce import cost_model_error, roofline_error
from reproduce.pages.generated_page import GPU, RESULTS, NoFlags, absent, filled, read, source, table, write
from reproduce.paper import auto_against_fixed, columns, cpu_roofline, tables
from reproduce.paper.columns import NONE, machine_name, of
from reproduce.paper.published import Record, grouped, is_of, pairs_of, published
from reproduce.paper.reproduction import ACCEPTANCE, COST_MODEL, SPEEDUPS

PAGE, FIGURES = ROOT / "reproduce" / "README.md", ROOT / "reproduce" / "figures"
ERROR = Column(lambda row: row["predicted_ms"] / row["measured_ms"] - 1, "error", "+.0%")


def page(folder: Path = RESULTS, figures: Path = FIGURES) -> str:
    facts, acceptance = published(), columns.rows_of(read(folder, ACCEPTANCE))
    runs = read(folder, SPEEDUPS) + [one for one in read(folder, GPU, "gpu_costs") if one.get("status") == "done"]
    runs = [run for run in runs if isinstance(run.get("gamma"), int) and run.get("draft_budget") != AUTO]
    own = [run for run in runs if run["file"] == SPEEDUPS]
    speculation = [run for run in runs if run.get("load_format") != "dummy"]
    is_published = any(is_of(fact, run) for fact in facts.speedups for run in speculation)
    drawn = {file.stem: f"![{file.stem.replace('_', ' ')}](figures/{file.name})\n\n" for file in figures.glob("*.svg")}

    def beside_published(groups: dict[str, list[Record]]) -> dict[str, str]:
        return {name: markdown(*tables.published_speedups(known, speculation)) for name, known in groups.items()}

    values = {
        "machines": ", ".join(dict.fromkeys(map(machine_name, [*runs, *acceptance]))) or NONE,
        "is_published": "published models" if is_published else "no published model",
        "facts": facts,
        "figures": defaultdict(str, drawn),
        "by_machine": beside_published(grouped(facts.speedup_tables, itemgetter("origin"))),
        "by_pair": beside_published({", ".join(pair): known for pair, known in pairs_of(facts.figure_6).items()}),
        "acceptance_by_context": markdown(*tables.published_acceptance(acceptance)),
        "ratios": markdown(*tables.published_ratios(runs)),
        "speedups": table("Speedup", *tables.of_runs("speedups", speculation), SPEEDUPS),
        "costs": table("Costs", *tables.of_runs("costs", own), SPEEDUPS),
        "flow": table("Throughput against latency", *tables.of_runs("flow", speculation), SPEEDUPS),
        "acceptance": table("Acceptance", *tables.acceptance(acceptance), ACCEPTANCE),
    }
    values |= roofline_tables(read(folder, roofline_error.ROOFLINE, "cpu_roofline"))
    return filled("published.md", values | cost_model_tables(read(folder, COST_MODEL)))


def roofline_tables(cpu: Sequence[Record]) -> dict[str, str]:
    """How far off predictions from data sheets are, by which constant, and on this CPU."""
    shown, rows = of("B prefix_len cost predicted_ms measured_ms", ERROR), cpu[-1]["rows"] if cpu else ()
    return {
        "roofline_summary": roofline_error.summary(),
        "cpu_summary": cpu_roofline.summary(cpu) if cpu else f"{NONE} where both could be compared",
        "roofline_errors": markdown(roofline_error.errors(), roofline_error.ERRORS),
        "roofline_on_cpu": table("The roofline on a CPU", cpu[-1:], shown, roofline_error.ROOFLINE, rows),
    }


def cost_model_tables(records: Sequence[Record]) -> dict[str, str]:
    """Predicted beside measured speedups, and `--gamma auto` beside fixed gammas."""
    compared = cost_model_error.comparisons(records)
    grids = [cost_model_error.grid_of(record) for record in records if record["benchmark"] == "cost_model"]
    return {
        "cost_error": cost_model_error.error_summary(compared).capitalize(),
        "cost_grids": "\n\n".join(cost_table(grid, markdown) for grid in grids) or NONE,
        "cost_errors": markdown(compared, of("cost_errors")) if compared else NONE,
        "modes": "".join(f"{auto_against_fixed.section_of(mode, records)}\n\n" for mode in auto_against_fixed.MODES),
        "cost_source": source(records) if records else absent("The cost model", COST_MODEL),
    }


if __name__ == "__main__":
    cli.run_alone(lambda flags: write(PAGE, page()), NoFlags)
