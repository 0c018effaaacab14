"""What `auto` is held against: which fixed gammas, in which repeats, and what is said of it."""

from __future__ import annotations

import io
from statistics import median
from typing import Any

import pytest

from common.errors import ConfigError
from engine.bench.config import RunConfig, Sizes, Target
from engine.bench.plan import resolve_several
from reproduce import cost_model_error
from reproduce.cost_model_error import CostModel
from reproduce.gamma_cell import Flags
from reproduce.pages.measured_tables import mode_section
from reproduce.paper import auto_against_fixed, reproduction
from reproduce.paper.auto_against_fixed import COLUMNS, GAMMA, GAMMA_AND_BUDGET, Against, against_fixed, summary

PLAIN = [10.0, 20.0, 10.0]


def row(way: str, budget: int | str | None, gamma: int | str, rates: list[float], **more: Any) -> dict[str, Any]:
    speedup = median(rate / plain for rate, plain in zip(rates, PLAIN, strict=True))
    setting = {"way": way, "draft_budget": budget, "gamma": gamma, "gammas": None, "budgets": None}
    return {**setting, "tokens_per_second": rates, "speedup": speedup, **more}


def fixed(gamma: int, rates: list[float], budget: int = 512) -> dict[str, Any]:
    return row(f"b={budget} g={gamma}", budget, gamma, rates)


def automatic(rates: list[float], gamma: int = 1) -> dict[str, Any]:
    """Gamma is chosen, and always this."""
    return row("auto", 512, "auto", rates, gammas=[[gamma]] * len(rates))


def cell(*rows: dict[str, Any], B: int = 4, gen_len: int = 64) -> dict[str, Any]:
    size = {"B": B, "prefix_len": 1000, "gen_len": gen_len}
    return {"benchmark": "gamma_cell", **size, "rows": [row("plain", None, 0, PLAIN), *rows]}


SMALL, LARGE = fixed(3, [14.0, 28.0, 14.0], budget=64), fixed(3, [12.0, 24.0, 9.0])
WIDE = fixed(5, [13.0, 26.0, 13.0])
AUTO = row("auto", 512, "auto", [12.0, 18.0, 9.0], gammas=[[0, 2], [4], [2]])
CHOSEN = {"gammas": [[3], [3], [3, 0]], "budgets": [[64], [512], [64, None]]}
BOTH = row("auto budget", "auto", "auto", [14.0, 14.0, 14.0], **CHOSEN)


def cells_of(found: Against) -> list[str]:
    return [column.cell(found) for column in COLUMNS]


def test_auto_gamma_is_held_against_its_own_budget_repeat_by_repeat():
    (found,) = against_fixed(GAMMA, [cell(SMALL, LARGE, WIDE, AUTO, BOTH)])
    # Held against gamma 3 in the last repeat, too, in which plain decoding was the better.
    assert found.ratios == (12 / 12, 18 / 24, 9 / 9)
    assert (found.usual, found.best) == (LARGE, WIDE)
    assert found.mean_gamma == 2.0 and not found.share_by_budget


def test_an_automatic_budget_is_held_against_the_best_budget():
    (found,) = against_fixed(GAMMA_AND_BUDGET, [cell(SMALL, LARGE, WIDE, AUTO, BOTH)])
    assert found.ratios == (14 / 14, 14 / 28, 14 / 14) and found.usual == found.best == SMALL
    assert "plain: 25 64: 50 512: 25" in cells_of(found)


def test_plain_decoding_can_be_the_best():
    (found,) = against_fixed(GAMMA, [cell(fixed(3, [5.0, 10.0, 5.0]), automatic(PLAIN, gamma=0))])
    assert found.best["way"] == "plain" and found.ratio == 1.0 and "plain" in cells_of(found)


@pytest.mark.parametrize("n_repeats,n_outside", [(1, 0), (4, 0), (5, 1), (7, 1), (8, 2), (13, 4), (20, 6)])
def test_the_interval_is_that_of_the_median(monkeypatch, n_repeats, n_outside):
    """As in tables of the sign test: of 8 repeats the second lowest and the second highest, of 4 there is none."""
    monkeypatch.setattr(f"{__name__}.PLAIN", [10.0] * n_repeats)
    ratios = [1 + n / 100 for n in range(n_repeats)]
    auto = automatic([10 * ratio for ratio in ratios])
    (found,) = against_fixed(GAMMA, [cell(fixed(3, [9.0] * n_repeats), auto)])
    line = cells_of(found)
    if n_outside == 0:
        assert found.interval is None and line[-2] == "-"
    else:
        ends = ratios[n_outside - 1], ratios[-n_outside]
        assert found.interval == pytest.approx(ends) and line[-2] == "{:.2f} to {:.2f}".format(*ends)
    assert line[-4] == str(n_repeats) and found.ratio == pytest.approx(median(ratios))


def test_without_gamma_3_the_nearest_stands_for_it():
    near, far = fixed(4, [12.0, 24.0, 12.0]), fixed(1, [20.0, 40.0, 20.0])
    (found,) = against_fixed(GAMMA, [cell(near, far, AUTO)])
    assert (found.usual, found.best) == (near, far) and "4, 512" in cells_of(found)


def test_a_record_without_the_way_is_left_out():
    assert against_fixed(GAMMA_AND_BUDGET, [cell(LARGE, AUTO), {"benchmark": "cost_model"}]) == []
    measured = "against the best of the measured budgets: not measured"
    printed = auto_against_fixed.table(GAMMA_AND_BUDGET, [cell(LARGE, AUTO)])
    assert printed == f"\n  --gamma auto --draft_budget auto, {measured}"
    section = mode_section(GAMMA_AND_BUDGET, [cell(LARGE, AUTO)])
    assert section == f"`--gamma auto --draft_budget auto`, {measured}.\n\n"


@pytest.mark.parametrize("ratio,says", [(0.96, "no median lies below"), (0.9496, "2 of 2 medians below")])
def test_the_summary_says_how_many_fall_short(ratio, says):
    auto, slow = automatic([ratio * rate for rate in PLAIN]), fixed(3, [1.0, 1.0, 1.0])
    found = against_fixed(GAMMA, [cell(slow, auto), cell(slow, auto, B=8)])
    assert f"{says}; the lowest median is {ratio:.4f}" in summary(found)


def test_the_summary_says_what_is_surely_below(monkeypatch):
    monkeypatch.setattr(f"{__name__}.PLAIN", [10.0] * 8)

    def run(*ratios: float) -> dict[str, Any]:
        return cell(fixed(3, [1.0] * 8), automatic([10 * ratio for ratio in ratios]))

    def said(*runs: dict[str, Any]) -> str:
        return summary(against_fixed(GAMMA, runs))

    sure, unsure = run(*[0.9] * 8), run(*[0.94] * 5, *[1.0] * 3)
    assert "1 of 1 medians below; of 1 intervals, 0 as a whole above and 0 below" in said(unsure)
    says = said(sure, unsure, run(*[1.0] * 8))
    assert "2 of 3 medians below; of 3 intervals, 1 as a whole above and 1 below; the lowest median is 0.9000" in says


def test_the_panel_has_a_point_for_every_run():
    """Also for two of one size; both ways of a run share its place, and fixed ones stand beside a chosen budget."""
    runs = [cell(LARGE, AUTO), cell(LARGE, AUTO, B=8), cell(LARGE, AUTO, BOTH, gen_len=128)]
    panel = auto_against_fixed.panel(runs)
    assert [(series.label, list(series.x)) for series in panel.series] == [
        ("best fixed", [2]),
        ("gamma 3 or nearest", [2]),
        ("gamma auto, largest budget", [0, 1, 2]),
        ("gamma and budget auto", [2]),
    ]
    assert panel.x_names == ("4 x 1000", "8 x 1000", "4 x 1000")
    assert [cells_of(found)[2] for found in against_fixed(GAMMA, runs)] == ["64", "64", "128"]


def test_every_cache_of_a_cell_is_planned_for():
    """One for each fixed pair, one for `auto`, and one for each budget that `auto budget` chooses among."""
    flags = Flags(gammas=(1, 9), budgets=(16, 40))
    drafts = flags.draft.variants(*flags.drafts().values())
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    planned = resolve_several(RunConfig(target, sizes=Sizes(2, 200)), drafts).draft
    assert planned is not None and sum(planned.capacities) == 2 * 16 + 2 * 40 + 40 + 64 + 128
    assert (planned.gamma, planned.capacity) == (9, 128)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"gen_len": 1}, {"repeats": 0}, {"gamma": (0, 3)}, {"B": (0, 8)}, {"prefix_len": (1, 1000)}),
        *({"draft_budget": (128, 9)}, {"draft_budget": (128,), "gamma": (3, 124)}),
        *({"between": (9, 2000)}, {"between": (4, 999)}),
    ],
    ids=str,
)
def test_what_no_cell_can_run_is_refused_before_any_does(sizes):
    """A budget has room for the largest block behind the sinks, and what is between lies there."""
    with pytest.raises(ConfigError, match=rf"where: .*{next(iter(sizes))}\b"):
        CostModel(**sizes).cells()
    assert CostModel(draft_budget=(128, 10)).cells() and CostModel(draft_budget=(128,), gamma=(3, 123)).cells()


def test_a_gamma_or_budget_that_is_given_twice_is_measured_once():
    for made in CostModel(gamma=(3, 1, 3), draft_budget=(128, 128)).cells():
        assert (made.flags["gammas"], made.flags["budgets"]) == ([1, 3], [128])


def test_figures_are_drawn_although_nobody_reads_the_table(tmp_path, monkeypatch):
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sweep = reproduction.Sweep(f"{tmp_path}/rows.jsonl", str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("sys.stdout", Left())
        reproduction.present([], sweep, "errors", cost_model_error.table, cost_model_error.figure)
    assert (tmp_path / "errors.png").is_file() and (tmp_path / "errors.svg").is_file()
