"""Compare measured speedups of fixed gammas with predictions from costs that `auto` measured in the same run."""

from collections.abc import Sequence
from itertools import chain
from statistics import median

from bench.auto.costs import tokens_per_round
from cost_model.report import costs_of
from reproduce.helpers.records import Record, grouped


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the predicted and the measured speedup of each fixed (rows, context, budget, gamma) whose costs are known.

    Costs are those that `auto budget` measured before each of its runs: the median of the predicted speedups counts.
    The acceptance rate is that of the run that a prediction is compared with."""
    found = []
    for run in records:
        measured = [row["measured_costs"] for row in run["rows"] if row["draft_budget"] == "auto"]
        for row in (row for row in run["rows"] if isinstance(row["gamma"], int) and row["gamma"] > 0):
            gamma, alpha, budget = row["gamma"], row["acceptance_rate"], row["draft_budget"]
            costs = [costs_of(cost) for cost in chain(*chain(*measured)) if cost["draft_budget"] == budget]
            if alpha is not None and costs:
                predicted = median(cost.speedup(tokens_per_round(alpha, gamma), gamma) for cost in costs)
                error = predicted / row["speedup"] - 1
                found.append(run | row | {"predicted": predicted, "measured": row["speedup"], "error": error})
    return found


def errors_by_size(records: Sequence[Record]) -> list[Record]:
    """Return the median and the largest error for each number of rows and context, and for all runs."""
    compared = compare(records)
    sizes = grouped(compared, lambda row: (row["B"], row["prefix_len"]))
    lines = []
    for (batch, context), rows in (*sorted(sizes.items()), (("all", None), compared)):
        errors = [abs(row["error"]) for row in rows]
        if errors:
            sizes_of = {"B": batch, "prefix_len": context, "runs": len(errors)}
            lines.append(sizes_of | {"median_error": median(errors), "largest_error": max(errors)})
    return lines
