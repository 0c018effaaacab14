"""Predicted next to measured speedups of fixed gammas."""

from common.checkout import ROOT
from reproduce.helpers.cost_errors import compare, errors_by_size
from reproduce.helpers.records import read_records


def test_every_fixed_draft_is_predicted_from_the_costs_that_auto_measured():
    records = read_records(ROOT / "reproduce" / "results" / "cost_model.jsonl")
    compared = compare(records)
    assert len(compared) == 30 and all(abs(one["error"]) < 0.25 for one in compared)
    *sizes, whole = errors_by_size(records)
    assert len(sizes) == 5 and whole["runs"] == 30 and whole["largest_error"] == max(abs(x["error"]) for x in compared)
    without = [run | {"rows": [row for row in run["rows"] if row["draft_budget"] != "auto"]} for run in records]
    assert compare(without) == []
