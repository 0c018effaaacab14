"""The cost model: the formula by hand, what pays best, and costs that runs have measured."""

import json
from dataclasses import replace

import pytest

from bench.auto.costs import Costs, tokens_per_round
from cost_model.report import Cell, best_of_each, costs_of
from tests.support.programs import BENCHMARKS, COST_MODEL, run

CHEAP = Costs(100, (1, 3), (110, 130), 5, 1)


def test_a_round_is_drafts_verification_and_the_rest():
    assert tokens_per_round(0.8, 3) == pytest.approx(2.952)
    assert tokens_per_round(1.0, 4) == 5 and tokens_per_round(0.0, 4) == 1 and tokens_per_round(0.7, 0) == 1
    costs = Costs(100, (1, 3, 5), (110, 130, 170), 20, 4)
    assert costs.round_ms(3) == 3 * 20 + 130 + 4
    assert costs.round_ms(2) == 2 * 20 + 120 + 4
    assert costs.round_ms(7) == 7 * 20 + 210 + 4  # the last straight line goes on
    assert Costs(100, (3,), (130,), 20, 4).round_ms(1) == 20 + 110 + 4  # from a plain step at gamma 0
    assert costs.speedup(2.952, 3) == pytest.approx(2.952 * 100 / 194)


def test_what_pays_best_names_the_draft_and_gives_up_where_nothing_pays():
    """Each context by its acceptance."""
    costs = [("streaming", 64), CHEAP], [("snapkv", 512), replace(CHEAP, draft_ms=40)]
    for alphas in ((0.5, 0.99), (0.9, 0.91), (0.1, 0.95)):
        cells = [Cell(1, 100, draft, each, alpha) for (draft, each), alpha in zip(costs, alphas, strict=True)]
        cells += [Cell(2, context, *costs[0], alpha=0.0) for context in (100, 200)]
        by_hand = {
            (*cell.draft, gamma): tokens_per_round(cell.alpha, gamma) * 100 / cell.costs.round_ms(gamma)
            for cell in cells[:2]
            for gamma in (1, 3)
        }
        best, *others = best_of_each(cells, (1, 3))
        chosen = best["draft_policy"], best["draft_budget"], best["gamma"]
        assert chosen == max(by_hand, key=by_hand.__getitem__)
        assert best["predicted_speedup"] == pytest.approx(by_hand[chosen], abs=1e-4)
        nothing = {"draft_policy": None, "draft_budget": None, "gamma": 0, "predicted_speedup": 1.0}
        assert others == [{"B": 2, "prefix_len": context} | nothing for context in (100, 200)]


def test_costs_and_acceptance_of_runs_that_chose_are_read(call, tmp_path):
    """A sweep's lines have records, and rows of a comparison costs of every repeat; other lines are passed over."""
    path = tmp_path / "auto.jsonl"
    flags = "--B 2 --prefix_len 60 --gen_len 24 --device cpu --gamma auto --draft_budget auto --dtype float64"
    measured = call(BENCHMARKS[-1], f"{flags} --output {path}").record
    costs = {"measured_costs": [measured["measured_costs"]] * 2, "drafter": "self@auto", "acceptance_rate": 0.5}
    lines = {"record": measured}, {"benchmark": "baseline"}, {"benchmark": "compare", "prefix_len": 60, "rows": [costs]}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + path.read_text())
    ended = run(COST_MODEL, f"--records {path} --gammas 1 3".split())

    def best_speedup(alpha: float | None) -> float:
        """By hand, of two rows."""
        rows = [costs for costs in measured["measured_costs"] if costs["rows"] == 2]
        rates = [costs["accepted_share"] if alpha is None else alpha for costs in rows]
        pairs = [(costs_of(costs), rate, gamma) for costs, rate in zip(rows, rates, strict=True) for gamma in (1, 3)]
        return max(1.0, *(costs.speedup(tokens_per_round(rate, gamma), gamma) for costs, rate, gamma in pairs))

    (best,) = (row for row in ended.record["best"] if row["B"] == 2)
    assert best["predicted_speedup"] == pytest.approx(best_speedup(None), abs=2e-3) and best["prefix_len"] == 60
    assert ended.out.count("streaming ") >= 4 * len(measured["measured_costs"]) and "what pays best" in ended.out
    given = run(COST_MODEL, f"--records {path} --gammas 1 3 --alpha 0".split())
    (best,) = (row for row in given.record["best"] if row["B"] == 2)
    assert best["predicted_speedup"] == pytest.approx(best_speedup(0.0), abs=2e-3)
    assert "--alpha" in given.out and "--alpha" not in ended.out
