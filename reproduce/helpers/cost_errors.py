"""Compare records of gamma_cell.py with predictions from costs that `auto` measured, and `auto` with fixed drafts."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median

from bench.auto.costs import tokens_per_round
from cost_model.report import costs_of
from reproduce.helpers.records import Record, grouped

# Names of gamma_cell.py's runs that choose gamma, or gamma and the budget, before each round.
AUTO, AUTO_BUDGET = "auto", "auto budget"
USUAL_GAMMA = 3


def runs_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["benchmark"] == "gamma_cell"]


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the predicted and the measured speedup of each fixed (rows, context, budget, gamma) whose costs are known.

    Costs are those that `auto budget` measured before each of its runs: the median of the predicted speedups counts.
    The acceptance rate is that of the run that a prediction is compared with."""
    found = []
    for run in runs_of(records):
        measured = [row["measured_costs"] for row in run["rows"] if row["way"] == AUTO_BUDGET]
        for row in run["rows"]:
            gamma, alpha, budget = row["gamma"], row["acceptance_rate"], row["draft_budget"]
            costs = [costs_of(cost) for cost in chain(*chain(*measured)) if cost["draft_budget"] == budget]
            if alpha is not None and isinstance(gamma, int) and gamma > 0 and costs:
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

    `ratio`: median over repeats of its tokens per second over those of gamma 3 (or the nearest) or plain decoding in
    the same repeat, whichever has the larger median speedup. `lowest`: the ratio of the lowest repeat. `best`: the best
    fixed speedup. `auto` drafts with the largest budget, and is compared with that budget alone."""
    found = []
    for run in runs_of(records):
        rows = {row["way"]: row for row in run["rows"]}
        if way not in rows:
            continue
        auto, plain = rows[way], rows["plain"]
        fixed = [row for row in rows.values() if isinstance(row["gamma"], int) and row["gamma"] > 0]
        if way == AUTO:
            fixed = [row for row in fixed if row["draft_budget"] == auto["draft_budget"]]
        usual = min(fixed, key=lambda row: (abs(row["gamma"] - USUAL_GAMMA), -row["speedup"]))
        better = max(plain, usual, key=lambda row: row["speedup"])
        rates = zip(auto["tokens_per_second"], better["tokens_per_second"], strict=True)
        ratios = [rate / other for rate, other in rates]
        best = max(row["speedup"] for row in [plain, *fixed])
        compared = {"usual": usual["speedup"], "best": best, "auto": auto["speedup"], "repeats": len(ratios)}
        compared |= {"ratio": median(ratios), "lowest": min(ratios), "mean_gamma": fmean(chain(*auto["gammas"]))}
        found.append(run | compared)
    return found
