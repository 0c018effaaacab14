"""The cost model's program: what it measures and predicts."""

import pytest
from programs import COST_MODEL, python

from cost_model import report

GRID = "--batches 1 2 --contexts 40 90 --budgets 16 40 --gammas 1 3 --device cpu --dtype float64 --snapkv_window 8"

# What acceptance is measured on here.
N_ROWS, N_TOKENS = 2, 60


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(report, "ACCEPTANCE_ROWS", N_ROWS)
    monkeypatch.setattr(report, "ACCEPTANCE_TOKENS", N_TOKENS)


def test_the_cost_model_prints_costs_a_heat_map_and_what_pays_best(call):
    ended = call(COST_MODEL, GRID)
    record, out = ended.record, ended.out
    assert len(record["best"]) == 4 and len(record["drafts"]) == 4
    assert len(record["plain_ms"]) == 2 and len(record["draft_ms"][0][0]) == 4
    assert out.count("predicted speedup,") == 4 and "what pays best" in out
    given = call(COST_MODEL, f"{GRID} --alpha 0.9")
    record = given.record
    assert record["acceptance_rates_by_context"] == [[0.9, 0.9]] * 4 and record["acceptance_of"] == "given"
    assert record["acceptance_standard_errors_by_context"] == [[None, None]] * 4 and "±" not in given.out


def test_acceptance_is_measured_at_every_context_as_if_it_were_the_only_one(call):
    ended = call(COST_MODEL, GRID)
    both = ended.record
    alone = call(COST_MODEL, GRID.replace("--contexts 40 90", "--contexts 90")).record
    for rates in both["acceptance_rates_by_context"]:
        assert len(rates) == 2 and all(0 <= rate <= 1 for rate in rates)
    assert [row[1:] for row in both["acceptance_rates_by_context"]] == alone["acceptance_rates_by_context"]
    assert any(short != long for short, long in both["acceptance_rates_by_context"])
    errors = both["acceptance_standard_errors_by_context"]
    assert all(error >= 0 for row in errors for error in row) and any(error for row in errors for error in row)


def test_a_large_gamma_asks_for_no_more_text_than_is_drafted(call):
    """Where rates are given, no text is drafted; where they are measured, at most three tokens of it a round."""
    sizes = "--batches 1 --contexts 40 --policies streaming --budgets 40 --device cpu"
    assert call(COST_MODEL, f"{sizes} --gammas 1 20 --alpha 0.8").record["gammas"] == [1, 20]
    record = call(COST_MODEL, f"{sizes} --gammas 1 20").record
    assert 0 <= record["acceptance_rates_by_context"][0][0] <= 1


def test_the_cost_model_is_run_as_a_module_without_a_warning():
    """It would be imported twice if the package imported it."""
    ended = python("-m", "cost_model", "--help")
    assert (ended.code, ended.err) == (0, "") and "--machine" in ended.out
