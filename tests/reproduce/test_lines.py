"""Predicted next to measured speedups of fixed gammas."""

from common.checkout import ROOT
from reproduce.helpers.lines import cost_errors, predicted_runs
from reproduce.helpers.records import read_records


def test_every_fixed_draft_is_predicted_from_the_costs_that_auto_measured():
    records = read_records(ROOT / "reproduce" / "results" / "cost_model.jsonl")
    errors = [abs(run["error"]) for run in predicted_runs(records)]
    assert len(errors) == 30 and max(errors) < 0.25
    *sizes, whole = cost_errors(records)
    assert len(sizes) == 5 and whole["number"] == 30 and whole["largest_error"] == max(errors)
    without = [run | {"rows": [row for row in run["rows"] if row["draft_budget"] != "auto"]} for run in records]
    assert cost_errors(without) == []
