"""The cost model against end-to-end runs: predicted and measured speedups, and `auto` against fixed gammas.

    python reproduce/cost_model_error.py

The costs are measured over random entries on a grid of batches and contexts, in a process of its own; the runs are
of real prompts at those sizes and at one between them, which the model interpolates. Each prediction takes the
acceptance rate of the run that it is compared with.
"""

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from statistics import median

import numpy as np

from bench.auto.costs import Costs, tokens_per_round
from common import cli
from common.errors import ConfigError
from common.tables import console
from cost_model.grid import CostGrid
from reproduce.paper import auto_against_fixed
from reproduce.paper.columns import of
from reproduce.paper.figures import POINTS, Figure, Panel, diagonal, lines
from reproduce.paper.published import Record
from reproduce.paper.reproduction import COST_MODEL, showing

TARGET = 0.10
# Where costs and a run have to agree to be compared.
SET_UP = ("model", "machine", "gpu", "device", "dtype", "draft_dtype", "draft_weights", "draft_layers", "quantize")
SET_UP += ("kv_dtype", "draft_kv_dtype", "attention", "compile", "pointwise")


def comparisons(records: Sequence[Record]) -> list[Record]:
    """The speedup, predicted and measured, of each fixed (rows, context, budget, gamma) whose costs are known."""
    found = []
    for run in auto_against_fixed.runs_of(records):
        for row in run["rows"]:
            gamma, alpha, measured = row["gamma"], row["acceptance_rate"], row["speedup"]
            costs = costs_of(records, run, row)
            if costs and alpha is not None and isinstance(gamma, int) and gamma > 0:
                predicted = costs.speedup(tokens_per_round(alpha, gamma), gamma)
                compared = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
                found.append(run | row | compared)
    return found


def costs_of(records: Sequence[Record], run: Record, row: Record) -> Costs | None:
    """Of a run's row, by the last grid of the same model, machine and settings that reaches to its size."""
    draft = run.get("draft_policy") or "streaming", row["draft_budget"]
    for record in reversed(records):
        is_same = all(record[name] == run[name] for name in SET_UP if name in record and name in run)
        if record["benchmark"] == "cost_model" and is_same:
            with suppress(ConfigError):
                return grid_of(record).at(run["B"], run["prefix_len"], draft)
    return None


def grid_of(record: Record) -> CostGrid:
    drafts = tuple((draft["draft_policy"], draft["draft_budget"]) for draft in record["drafts"])
    axes = {name: tuple(record[name]) for name in ("batches", "contexts", "gammas")}
    costs = {name: np.array(record[f"{name}_ms"]) for name in ("plain", "verify", "draft", "other")}
    return CostGrid(drafts=drafts, **axes, **costs)


def error_summary(compared: Sequence[Record]) -> str:
    if not compared:
        return "nothing compared"
    errors = [abs(row["error"]) for row in compared]
    return f"median error {median(errors):.1%}, largest {max(errors):.1%}; the aim is a median of {TARGET:.0%}"


def table(records: list[Record]) -> str:
    compared, title = comparisons(records), "  Speedups, predicted by the cost model and measured end to end\n"
    modes = (f"\n{auto_against_fixed.section_of(mode, records, console)}" for mode in auto_against_fixed.MODES)
    return "\n".join([title, console(compared, of("cost_errors")), f"  {error_summary(compared)}", *modes])


def figure(records: list[Record]) -> Figure:
    compared = sorted(comparisons(records), key=itemgetter("B", "prefix_len"))
    label = "B {B}, {prefix_len} tokens".format_map
    points = lines(compared, label, "measured", "predicted", style=POINTS | {"marker": "o"})
    series = [diagonal(compared, "predicted", "measured"), *points]
    panel = Panel("the cost model", "measured speedup", "predicted speedup", series, is_log_x=False)
    return Figure("Predicted and measured speedups", [panel])


if __name__ == "__main__":
    cli.run_alone(*showing(COST_MODEL, table, {"cost_model_error": figure}))
