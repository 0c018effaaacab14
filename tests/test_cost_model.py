"""The cost model: the formula by hand, interpolation, what pays best, the heat map."""

from __future__ import annotations

import pytest

from engine import cost_report
from engine.cost_model import CostGrid, Costs, tokens_per_round
from kv_cache.errors import ConfigError

PLAIN, AT, VERIFY, DRAFT, OTHER = 100.0, (1, 3, 5), (110.0, 130.0, 170.0), 20.0, 4.0


def test_tokens_per_round_is_the_geometric_sum():
    assert tokens_per_round(0.8, 3) == pytest.approx(2.952)
    assert tokens_per_round(0.5, 2) == pytest.approx(1.75)
    assert tokens_per_round(1.0, 4) == 5 and tokens_per_round(0.0, 4) == 1 and tokens_per_round(0.7, 0) == 1


def test_a_round_is_drafts_verification_and_the_rest():
    costs = Costs(PLAIN, AT, VERIFY, DRAFT, OTHER)
    assert costs.round_ms(3) == 3 * 20 + 130 + 4
    assert costs.round_ms(2) == 2 * 20 + 120 + 4
    assert costs.round_ms(7) == 7 * 20 + 210 + 4  # the last straight line goes on
    assert Costs(PLAIN, (3,), (130.0,), DRAFT, OTHER).round_ms(1) == 20 + 110 + 4  # from a plain step at gamma 0
    assert costs.speedup(2.952, 3) == pytest.approx(2.952 * 100 / 194)
    by_hand = {g: tokens_per_round(0.9, g) * 100 / costs.round_ms(g) for g in range(1, 8)}
    gamma, speedup = costs.best_gamma(0.9, range(1, 8))
    assert speedup == max(by_hand.values()) == by_hand[gamma] and gamma == 3
    assert costs.best_gamma(0.1, range(1, 8))[0] == 1


def test_the_grid_is_interpolated_in_batch_and_context():
    """Of costs that are bilinear the interpolation is exact, at the corners and between them."""

    def true(batch, context, budget):
        plain = 10 + 2 * batch + batch * context / 100
        return Costs(plain, (1, 4), (1.1 * plain, 1.4 * plain), 5 + batch * budget / 64, 0.5 * batch)

    drafts = [("streaming", 64), ("snapkv", 256)]
    batches, contexts = (1, 4, 8), (500, 2000)
    cells = [[[true(b, s, budget) for _, budget in drafts] for s in contexts] for b in batches]
    grid = CostGrid.of(batches, contexts, drafts, cells)
    for batch, context in ((1, 500), (8, 2000), (4, 1100), (6, 1700), (3, 600)):
        for draft in drafts:
            got, wanted = grid.at(batch, context, draft), true(batch, context, draft[1])
            assert got.plain_ms == pytest.approx(wanted.plain_ms)
            assert got.verify_ms == pytest.approx(wanted.verify_ms)
            assert (got.draft_ms, got.other_ms) == pytest.approx((wanted.draft_ms, wanted.other_ms))
    for outside in ((9, 1000), (4, 400), (0, 500)):
        with pytest.raises(ConfigError, match="were not measured"):
            grid.at(*outside, drafts[0])


def test_what_pays_best_names_the_draft_and_gives_up_where_nothing_pays():
    cheap, dear = Costs(100, (1, 3), (110, 130), 5, 1), Costs(100, (1, 3), (110, 130), 40, 1)
    drafts = [("streaming", 64), ("snapkv", 512)]
    grid = CostGrid.of((1,), (100,), drafts, [[[cheap, dear]]])
    for alphas in ((0.5, 0.99), (0.9, 0.91), (0.1, 0.95)):
        by_hand = {
            (*draft, gamma): tokens_per_round(alpha, gamma) * 100 / costs.round_ms(gamma)
            for draft, alpha, costs in zip(drafts, alphas, (cheap, dear), strict=True)
            for gamma in (1, 3)
        }
        best = cost_report.best_of(grid, 1, 100, dict(zip(drafts, alphas, strict=True)), [1, 3])
        chosen = best["draft_policy"], best["draft_budget"], best["gamma"]
        assert chosen == max(by_hand, key=by_hand.__getitem__)
        assert best["predicted_speedup"] == pytest.approx(by_hand[chosen], abs=1e-4)
    nothing = cost_report.best_of(grid, 1, 100, dict.fromkeys(drafts, 0.0), [1, 3])
    assert nothing["gamma"] == 0 and nothing["draft_policy"] is None and nothing["predicted_speedup"] == 1


def test_the_heat_map_is_darker_where_speculation_gains_more():
    costs = [Costs(100, (1, 3), (verify, verify), 1, 1) for verify in (400.0, 100.0)]
    grid = CostGrid.of((1, 8), (100,), [("streaming", 64)], [[[costs[0]]], [[costs[1]]]])
    lines = cost_report.heat_map(grid, ("streaming", 64), 0.9, [1, 3]).splitlines()
    assert len(lines) == 4 and "g=1" in lines[1] and "g=3" in lines[1]
    assert "0.47" in lines[2] and "3.31" in lines[3]
    assert cost_report.SHADES[-1] * 2 in lines[3] and cost_report.SHADES[-1] not in lines[2]
