"""What `auto` is held against: which fixed ways, in which repeats, and what is said of it."""

from __future__ import annotations

import io
from statistics import median
from typing import Any

import pytest

from common.errors import ConfigError
from engine.bench.settings import DraftSettings
from reproduce import cost_model_error, gamma_cell
from reproduce.pages.measured_tables import choosing_section
from reproduce.paper import auto_against_fixed, reproduction
from reproduce.paper.auto_against_fixed import GAMMA, GAMMA_AND_BUDGET, against_fixed, summary

PLAIN = [10.0, 20.0, 10.0]


def row(way: str, budget: int | str | None, gamma: int | str, rates: list[float], **more: Any) -> dict[str, Any]:
    return {
        "way": way,
        "draft_budget": budget,
        "gamma": gamma,
        "tokens_per_second": rates,
        "speedup": median(rate / plain for rate, plain in zip(rates, PLAIN, strict=True)),
        "gammas": None,
        **more,
    }


def cell(*ways: dict[str, Any], B: int = 4, gen_len: int = 64) -> dict[str, Any]:
    size = {"B": B, "prefix_len": 1000, "gen_len": gen_len}
    return {"benchmark": "gamma_cell", **size, "rows": [row("plain", None, 0, PLAIN), *ways]}


SMALL = row("b=64 g=3", 64, 3, [14.0, 28.0, 14.0])
LARGE = row("b=512 g=3", 512, 3, [12.0, 24.0, 9.0])
WIDE = row("b=512 g=5", 512, 5, [13.0, 26.0, 13.0])
AUTO = row("auto", 512, "auto", [12.0, 18.0, 9.0], gammas=[[0, 2], [4], [2]], budgets=None)
CHOSEN = {"gammas": [[3], [3], [3, 0]], "budgets": [[64], [512], [64, None]]}
BOTH = row("auto budget", "auto", "auto", [14.0, 14.0, 14.0], **CHOSEN)


def test_auto_gamma_is_held_against_its_own_budget_repeat_by_repeat():
    (found,) = against_fixed(GAMMA, [cell(SMALL, LARGE, WIDE, AUTO, BOTH)])
    # Held against gamma 3 in the last repeat, too, in which plain decoding was the better.
    assert found.ratios == (12 / 12, 18 / 24, 9 / 9)
    assert (found.usual, found.usual_gamma, found.usual_budget) == (1.2, 3, 512)
    assert (found.best, found.best_gamma, found.best_budget) == (1.3, 5, 512)
    assert found.mean_gamma == 2.0 and not found.share_by_budget


def test_an_automatic_budget_is_held_against_the_best_budget():
    (found,) = against_fixed(GAMMA_AND_BUDGET, [cell(SMALL, LARGE, WIDE, AUTO, BOTH)])
    assert found.ratios == (14 / 14, 14 / 28, 14 / 14) and found.usual_budget == 64
    assert (found.best, found.best_gamma, found.best_budget) == (1.4, 3, 64)
    (line,) = auto_against_fixed.lines(GAMMA_AND_BUDGET, [cell(SMALL, LARGE, WIDE, AUTO, BOTH)])
    assert "plain: 25 64: 50 512: 25" in line
    assert found.share_by_budget == {64: 0.5, 512: 0.25, None: 0.25}


def test_plain_decoding_can_be_the_best():
    slow = row("b=512 g=3", 512, 3, [5.0, 10.0, 5.0])
    (found,) = against_fixed(GAMMA, [cell(slow, row("auto", 512, "auto", PLAIN, gammas=[[0]] * 3, budgets=None))])
    assert (found.best, found.best_gamma) == (1.0, 0) and found.ratio == 1.0
    (line,) = auto_against_fixed.lines(GAMMA, [cell(slow, AUTO)])
    assert "plain" in line


@pytest.mark.parametrize("n_repeats,n_outside", [(1, 0), (4, 0), (5, 1), (7, 1), (8, 2), (13, 4), (20, 6)])
def test_the_interval_is_that_of_the_median(monkeypatch, n_repeats, n_outside):
    """As in tables of the sign test: of 8 repeats the second lowest and the second highest, of 4 there is none."""
    monkeypatch.setattr(f"{__name__}.PLAIN", [10.0] * n_repeats)
    ratios = [1 + n / 100 for n in range(n_repeats)]
    auto = row("auto", 512, "auto", [10 * ratio for ratio in ratios], gammas=[[1]] * n_repeats, budgets=None)
    records = [cell(row("b=512 g=3", 512, 3, [9.0] * n_repeats), auto)]
    (found,) = against_fixed(GAMMA, records)
    (line,) = auto_against_fixed.lines(GAMMA, records)
    if n_outside == 0:
        assert found.interval is None and line[-2] == "-"
    else:
        ends = ratios[n_outside - 1], ratios[-n_outside]
        assert found.interval == pytest.approx(ends) and line[-2] == "{:.2f} to {:.2f}".format(*ends)
    assert line[-4] == str(n_repeats) and found.ratio == pytest.approx(median(ratios))


def test_without_gamma_3_the_nearest_stands_for_it():
    near, far = row("b=512 g=4", 512, 4, [12.0, 24.0, 12.0]), row("b=512 g=1", 512, 1, [20.0, 40.0, 20.0])
    (found,) = against_fixed(GAMMA, [cell(near, far, AUTO)])
    assert found.usual_gamma == 4 and found.best_gamma == 1
    assert "4, 512" in auto_against_fixed.lines(GAMMA, [cell(near, far, AUTO)])[0]


def test_a_record_without_the_way_is_left_out():
    assert against_fixed(GAMMA_AND_BUDGET, [cell(LARGE, AUTO), {"benchmark": "cost_model"}]) == []
    measured = "against the best of the measured budgets: not measured"
    printed = auto_against_fixed.table(GAMMA_AND_BUDGET, [cell(LARGE, AUTO)])
    assert printed == f"\n  --gamma auto --draft_budget auto, {measured}"
    section = choosing_section(GAMMA_AND_BUDGET, [cell(LARGE, AUTO)])
    assert section == f"`--gamma auto --draft_budget auto`, {measured}.\n\n"


@pytest.mark.parametrize(
    "ratio,says",
    [
        (0.96, "no median lies below; the lowest median is 0.9600"),
        (0.9496, "2 of 2 medians below; the lowest median is 0.9496"),
    ],
)
def test_the_summary_says_how_many_fall_short(ratio, says):
    auto = row("auto", 512, "auto", [ratio * rate for rate in PLAIN], gammas=[[1]] * 3, budgets=None)
    slow = row("b=512 g=3", 512, 3, [1.0, 1.0, 1.0])
    assert says in summary(GAMMA, [cell(slow, auto), cell(slow, auto, B=8)])


def test_the_summary_says_what_is_surely_below(monkeypatch):
    monkeypatch.setattr(f"{__name__}.PLAIN", [10.0] * 8)
    slow = row("b=512 g=3", 512, 3, [1.0] * 8)

    def run(*ratios: float) -> dict[str, Any]:
        rates = [10 * ratio for ratio in ratios]
        return cell(slow, row("auto", 512, "auto", rates, gammas=[[1]] * 8, budgets=None))

    sure, unsure = run(*[0.9] * 8), run(*[0.94] * 5, *[1.0] * 3)
    assert "1 of 1 medians below; of 1 intervals, 0 as a whole above and 0 below" in summary(GAMMA, [unsure])
    says = summary(GAMMA, [sure, unsure, run(*[1.0] * 8)])
    assert says.endswith(
        "2 of 3 medians below; of 3 intervals, 1 as a whole above and 1 below; the lowest median is 0.9000"
    )


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
    place = auto_against_fixed.HEAD.index("new tokens")
    assert [line[place] for line in auto_against_fixed.lines(GAMMA, runs)] == ["64", "64", "128"]


def test_every_cache_of_a_cell_is_planned_for():
    """One for each fixed pair, one for `auto`, and one for each budget that `auto budget` chooses among."""
    fixed = [DraftSettings("self", gamma=gamma, capacity=budget) for budget in (16, 40) for gamma in (1, 9)]
    auto = DraftSettings("self", gamma=6, auto_gamma=True, capacity=40)
    both = DraftSettings("self", gamma=6, auto_gamma=True, capacity=128, budgets=(64, 128))
    planned = gamma_cell.with_every_cache([*fixed, auto, both])
    assert sum(planned.capacities) == 2 * 16 + 2 * 40 + 40 + 64 + 128
    assert (planned.gamma, planned.capacity) == (9, 128)


@pytest.mark.parametrize(
    "flags",
    [
        "--gen_len 1",
        "--repeats 0",
        "--gamma 0 3",
        "--B 0 8",
        "--prefix_len 1 1000",
        "--draft_budget 128 9",
        "--draft_budget 128 --gamma 3 124",
    ],
)
def test_what_no_cell_can_run_is_refused_before_any_does(flags):
    flag = flags.split()[0]
    with pytest.raises(ConfigError, match=rf"where: .*{flag}\b"):
        cost_model_error.cells(cost_model_error.make_parser().parse_args(flags.split()))


@pytest.mark.parametrize("flags", ["--draft_budget 128 10", "--draft_budget 128 --gamma 3 123"])
def test_a_budget_has_room_for_the_largest_block_behind_the_sinks(flags):
    assert cost_model_error.cells(cost_model_error.make_parser().parse_args(flags.split()))


def test_figures_are_drawn_although_nobody_reads_the_table(tmp_path, monkeypatch):
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    args = cost_model_error.make_parser().parse_args(["--output", f"{tmp_path}/rows.jsonl", "--figures", str(tmp_path)])
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("sys.stdout", Left())
        reproduction.present(args, [], "errors", cost_model_error.table, cost_model_error.figure)
    assert (tmp_path / "errors.png").is_file() and (tmp_path / "errors.svg").is_file()


def test_a_gamma_or_budget_that_is_given_twice_is_measured_once():
    twice = ["--gamma", "3", "1", "3", "--draft_budget", "128", "128"]
    for made in cost_model_error.cells(cost_model_error.make_parser().parse_args(twice)):
        assert (made.flags["gammas"], made.flags["budgets"]) == ([1, 3], [128])
