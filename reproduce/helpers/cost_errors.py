"""Compare measured speedups of fixed gammas with predictions from costs that `auto` measured, and `auto` with them."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median

from bench.auto.costs import tokens_per_round
from cost_model.report import costs_of
from reproduce.helpers.records import Record, grouped

# Runs that choose gamma, or gamma and the budget, before each round.
AUTO, AUTO_BUDGET = "auto", "auto budget"
USUAL_GAMMA = 3


def runs_of(records: Sequence[Record]) -> list[Record]:
    """Return the records of fixed gammas and budgets in turns."""
    return [record for record in records if record["benchmark"] in ("compare", "gamma_cell")]


def fixed_rows(run: Record) -> list[Record]:
    """Return the rows of a run whose gamma and budget are not chosen while decoding."""
    return [row for row in run["rows"] if isinstance(row["gamma"], int) and row["gamma"] > 0]


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the predicted and the measured speedup of each fixed (rows, context, budget, gamma) whose costs are known.

    Costs are those that `auto budget` measured before each of its runs: the median of the predicted speedups counts.
    The acceptance rate is that of the run that a prediction is compared with."""
    found = []
    for run in runs_of(records):
        measured = [row["measured_costs"] for row in run["rows"] if row["draft_budget"] == "auto"]
        for row in fixed_rows(run):
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


def against_fixed(records: Sequence[Record], way: str) -> list[Record]:
    """Compare a way to choose gamma with fixed choices, in each run that has it.

    `ratio_to_better`: median over repeats of its speedup over that of gamma 3 (or the nearest) or plain decoding in the
    same repeat, whichever has the larger median. `lowest`: the ratio of the lowest repeat. `best`: the best fixed
    speedup. `auto` drafts with the largest budget, and is compared with that budget alone."""
    found = []
    for run in runs_of(records):
        is_choosing = [row for row in run["rows"] if row["gamma"] == "auto"]
        ways = [row for row in is_choosing if (row["draft_budget"] == "auto") == (way == AUTO_BUDGET)]
        if not ways:
            continue
        auto, fixed = ways[-1], fixed_rows(run)
        if way == AUTO:
            fixed = [row for row in fixed if row["draft_budget"] == auto["draft_budget"]]
        plain = {"speedup": 1.0, "speedups": [1.0] * len(auto["speedups"])}
        usual = min(fixed, key=lambda row: (abs(row["gamma"] - USUAL_GAMMA), -row["speedup"]))
        better = max(plain, usual, key=lambda row: row["speedup"])
        ratios = [mine / other for mine, other in zip(auto["speedups"], better["speedups"], strict=True)]
        best = max(row["speedup"] for row in [plain, *fixed])
        compared = {"usual": usual["speedup"], "best": best, "auto": auto["speedup"], "repeats": len(ratios)}
        compared |= {
            "ratio_to_better": median(ratios),
            "lowest": min(ratios),
            "mean_gamma": fmean(chain(*auto["gammas"])),
        }
        found.append(run | compared)
    return found
