"""Predicted next to measured speedups, and the fixed gammas that `auto` is compared with."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from common.checkout import ROOT
from reproduce.helpers.cost_errors import AUTO, AUTO_BUDGET, against_fixed, compare, errors_by_size
from reproduce.helpers.records import read_records


def row(budget: int | str | None, gamma: int | str, ratios: Sequence[float], **more: Any) -> dict[str, Any]:
    """Return a row. ratios: to plain decoding, by repeat."""
    return {"draft_budget": budget, "gamma": gamma, "speedups": [*ratios], "speedup": median(ratios), **more}


def fixed(gamma: int, ratios: Sequence[float], budget: int = 512) -> dict[str, Any]:
    return row(budget, gamma, ratios)


SMALL, LARGE, WIDE = fixed(3, [1.4] * 3, budget=64), fixed(3, [1.2, 1.2, 0.9]), fixed(5, [1.3] * 3)
SLOW = fixed(3, [0.5] * 3)
CHOSEN = row(512, "auto", [1.2, 0.9, 0.9], gammas=[[0, 2], [4], [2]])
BOTH = row("auto", "auto", [1.4, 0.7, 1.4], gammas=[[3], [3], [3, 0]], budgets=[[64], [512], [64]])
EVEN = row(512, "auto", [1, 1, 1], gammas=[[0]] * 3)


@pytest.mark.parametrize(
    "way,rows,usual,best,ratios",
    [
        # Compared with gamma 3 in the last repeat too, in which plain decoding was the better.
        (AUTO, [SMALL, LARGE, WIDE, CHOSEN, BOTH], 1.2, 1.3, [1, 0.75, 1]),
        (AUTO_BUDGET, [SMALL, LARGE, WIDE, CHOSEN, BOTH], 1.4, 1.4, [1, 0.5, 1]),
        (AUTO, [SLOW, EVEN], 0.5, 1.0, [1, 1, 1]),
    ],
    ids=["auto: its budget", "auto budget: any", "plain decoding is the best"],
)
def test_auto_is_compared_with_gamma_3_or_plain_decoding(way, rows, usual, best, ratios):
    size = {"B": 4, "prefix_len": 1000}
    record = {"benchmark": "compare", **size, "rows": [*rows]}
    (found,) = against_fixed([record, {"benchmark": "selfspec"}], way)
    assert (found["usual"], found["best"]) == (usual, best)
    assert (found["ratio_to_better"], found["lowest"]) == (pytest.approx(median(ratios)), pytest.approx(min(ratios)))


def test_every_fixed_draft_is_predicted_from_the_costs_that_auto_measured():
    records = read_records(ROOT / "reproduce" / "results" / "cost_model.jsonl")
    compared = compare(records)
    assert len(compared) == 30 and all(abs(one["error"]) < 0.25 for one in compared)
    *sizes, whole = errors_by_size(records)
    assert len(sizes) == 5 and whole["runs"] == 30 and whole["largest_error"] == max(abs(x["error"]) for x in compared)
    without = [run | {"rows": [row for row in run["rows"] if row["draft_budget"] != "auto"]} for run in records]
    assert compare(without) == []
