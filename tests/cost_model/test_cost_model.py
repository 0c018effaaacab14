"""The cost model: the formula by hand, interpolation, what pays best, and its program."""

import itertools
from dataclasses import replace

import pytest

from bench.auto.costs import Costs, tokens_per_round
from common.errors import ConfigError
from cost_model import report, tables
from cost_model.grid import CostGrid
from tests.support.programs import COST_MODEL

DRAFTS = [("streaming", 64), ("snapkv", 512)]
CHEAP = Costs(100, (1, 3), (110, 130), 5, 1)


def given(alphas):
    """The acceptance of each of `DRAFTS`, by context."""
    rates = {context: map(tables.Acceptance, each) for context, each in alphas.items()}
    return {context: dict(zip(DRAFTS, each, strict=False)) for context, each in rates.items()}


def test_a_round_is_drafts_verification_and_the_rest():
    assert tokens_per_round(0.8, 3) == pytest.approx(2.952)
    assert tokens_per_round(1.0, 4) == 5 and tokens_per_round(0.0, 4) == 1 and tokens_per_round(0.7, 0) == 1
    costs = Costs(100, (1, 3, 5), (110, 130, 170), 20, 4)
    assert costs.round_ms(3) == 3 * 20 + 130 + 4
    assert costs.round_ms(2) == 2 * 20 + 120 + 4
    assert costs.round_ms(7) == 7 * 20 + 210 + 4  # the last straight line goes on
    assert Costs(100, (3,), (130,), 20, 4).round_ms(1) == 20 + 110 + 4  # from a plain step at gamma 0
    assert costs.speedup(2.952, 3) == pytest.approx(2.952 * 100 / 194)


def test_the_grid_is_interpolated_in_batch_and_context():
    """The interpolation of bilinear costs is exact, at the corners and between them."""

    def true(batch, context, budget):
        plain = 10 + 2 * batch + batch * context / 100
        return Costs(plain, (1, 4), (1.1 * plain, 1.4 * plain), 5 + batch * budget / 64, 0.5 * batch, fixed_ms=2)

    drafts = [("streaming", 64), ("snapkv", 256)]
    sizes = itertools.product((1, 4, 8), (500, 2000))
    grid = CostGrid.of(drafts, {size: [true(*size, budget) for _, budget in drafts] for size in sizes})
    for batch, context in ((1, 500), (8, 2000), (4, 1100), (6, 1700), (3, 600)):
        for draft in drafts:
            got, wanted = grid.at(batch, context, draft), true(batch, context, draft[1])
            assert got.plain_ms == pytest.approx(wanted.plain_ms)
            assert got.verify_ms == pytest.approx(wanted.verify_ms)
            assert got.draft_ms == pytest.approx(wanted.draft_ms)
            assert [got.round_ms(gamma) for gamma in (1, 4)] == pytest.approx(
                [wanted.round_ms(gamma) for gamma in (1, 4)]
            )
    for outside in ((9, 1000), (4, 400), (0, 500)):
        with pytest.raises(ConfigError, match="were not measured"):
            grid.at(*outside, drafts[0])


def test_what_pays_best_names_the_draft_and_gives_up_where_nothing_pays():
    each = [CHEAP, replace(CHEAP, draft_ms=40)]
    grid = CostGrid.of(DRAFTS, {(1, 100): each})
    for alphas in ((0.5, 0.99), (0.9, 0.91), (0.1, 0.95)):
        by_hand = {
            (*draft, gamma): tokens_per_round(alpha, gamma) * 100 / costs.round_ms(gamma)
            for draft, alpha, costs in zip(DRAFTS, alphas, each, strict=True)
            for gamma in (1, 3)
        }
        [best] = tables.best_of_each(grid, given({100: alphas}))
        chosen = best["draft_policy"], best["draft_budget"], best["gamma"]
        assert chosen == max(by_hand, key=by_hand.__getitem__)
        assert best["predicted_speedup"] == pytest.approx(by_hand[chosen], abs=1e-4)
    [nothing] = tables.best_of_each(grid, given({100: (0.0, 0.0)}))
    assert nothing["gamma"] == 0 and nothing["draft_policy"] is None and nothing["predicted_speedup"] == 1


def test_each_context_is_predicted_from_its_acceptance():
    grid = CostGrid.of(DRAFTS, {(1, context): [CHEAP, CHEAP] for context in (100, 200)})
    acceptances = given({100: (0.9, 0.2), 200: (0.3, 0.8)})
    best = tables.best_of_each(grid, acceptances)
    assert [row["draft_policy"] for row in best] == ["streaming", "snapkv"]
    wanted = [tokens_per_round(alpha, 3) * 100 / CHEAP.round_ms(3) for alpha in (0.9, 0.8, 0.3)]
    assert [row["predicted_speedup"] for row in best] == pytest.approx(wanted[:2], abs=1e-4)
    at_100, at_200 = tables.heat_map(grid, DRAFTS[0], acceptances).splitlines()[2:]
    assert "0.900" in at_100 and f"{wanted[0]:.2f}" in at_100
    assert "0.300" in at_200 and f"{wanted[2]:.2f}" in at_200


GRID = "--batches 1 2 --contexts 40 90 --budgets 16 40 --gammas 1 3 --device cpu --dtype float64 --snapkv_window 8"


def test_the_program_measures_costs_and_acceptance_at_every_size(call, monkeypatch):
    """Each context is as if it were the only one; rates that are given are not measured."""
    monkeypatch.setattr(report, "ACCEPTANCE_ROWS", 2)
    monkeypatch.setattr(report, "ACCEPTANCE_TOKENS", 60)
    ended = call(COST_MODEL, GRID)
    record, out = ended.record, ended.out
    assert len(record["best"]) == 4 and len(record["drafts"]) == 4
    assert len(record["plain_ms"]) == 2 and len(record["draft_ms"][0][0]) == 4
    assert out.count("predicted speedup,") == 4 and "what pays best" in out
    rates, errors = (record[f"acceptance_{name}_by_context"] for name in ("rates", "standard_errors"))
    assert all(len(row) == 2 and 0 <= min(row) <= max(row) <= 1 for row in rates)
    assert any(short != long for short, long in rates)
    assert all(error >= 0 for row in errors for error in row) and any(error for row in errors for error in row)
    alone = call(COST_MODEL, GRID.replace("--contexts 40 90", "--contexts 90")).record
    assert [row[1:] for row in rates] == alone["acceptance_rates_by_context"]
    given = call(COST_MODEL, f"{GRID} --alpha 0.9")
    assert given.record["acceptance_rates_by_context"] == [[0.9, 0.9]] * 4 and "±" not in given.out
