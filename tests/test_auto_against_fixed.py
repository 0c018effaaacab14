"""What `auto` is held against: which fixed gammas, in which repeats, and what is said of it."""

from collections.abc import Sequence
from itertools import cycle
from statistics import median
from typing import Any

import pytest

from bench.config import RunConfig, Sizes, Target
from bench.plan import resolve_several
from reproduce.gamma_cell import Flags
from reproduce.paper.auto_against_fixed import AUTO as AUTO_GAMMA
from reproduce.paper.auto_against_fixed import AUTO_BUDGET, against_fixed, section_of, summary
from reproduce.paper.columns import of

PLAIN = [10.0, 20.0, 10.0]


def times_plain(ratios: Sequence[float]) -> list[float]:
    return [ratio * plain for ratio, plain in zip(ratios, cycle(PLAIN), strict=False)]


def row(way: str, budget: int | str | None, gamma: int | str, ratios: Sequence[float], **more: Any) -> dict[str, Any]:
    """ratios: to plain decoding, by repeat."""
    setting = {"way": way, "draft_budget": budget, "gamma": gamma, "gammas": None, "budgets": None}
    return {**setting, "tokens_per_second": times_plain(ratios), "speedup": median(ratios), **more}


def fixed(gamma: int, ratios: Sequence[float], budget: int = 512) -> dict[str, Any]:
    return row(f"b={budget} g={gamma}", budget, gamma, ratios)


def automatic(ratios: Sequence[float], gamma: int = 1) -> dict[str, Any]:
    """Gamma is chosen, and always this."""
    return row("auto", 512, "auto", ratios, gammas=[[gamma]] * len(ratios))


def cell(*rows: dict[str, Any], B: int = 4, gen_len: int = 64) -> dict[str, Any]:
    size, n_repeats = {"B": B, "prefix_len": 1000, "gen_len": gen_len}, len(rows[0]["tokens_per_second"])
    return {"benchmark": "gamma_cell", **size, "rows": [row("plain", None, 0, [1.0] * n_repeats), *rows]}


SMALL, LARGE = fixed(3, [1.4, 1.4, 1.4], budget=64), fixed(3, [1.2, 1.2, 0.9])
WIDE = fixed(5, [1.3, 1.3, 1.3])
AUTO = row("auto", 512, "auto", [1.2, 0.9, 0.9], gammas=[[0, 2], [4], [2]])
CHOSEN = {"gammas": [[3], [3], [3, 0]], "budgets": [[64], [512], [64, None]]}
BOTH = row("auto budget", "auto", "auto", [1.4, 0.7, 1.4], **CHOSEN)
SLOW, NEAR, FAR = fixed(3, [0.5, 0.5, 0.5]), fixed(4, [1.2, 1.2, 1.2]), fixed(1, [2.0, 2.0, 2.0])


def cells_of(found: dict[str, Any]) -> dict[str, str]:
    return {column.head: column.cell(found) for column in of("automatic")}


@pytest.mark.parametrize(
    "mode,rows,usual,best,ratios,shown",
    [
        # Held against gamma 3 in the last repeat, too, in which plain decoding was the better.
        (AUTO_GAMMA, [SMALL, LARGE, WIDE, AUTO, BOTH], LARGE, WIDE, [1, 0.75, 1], {"mean gamma": "2.0"}),
        (
            AUTO_BUDGET,
            [SMALL, LARGE, WIDE, AUTO, BOTH],
            SMALL,
            SMALL,
            [1, 0.5, 1],
            {"best gamma, budget": "3, 64"},
        ),
        (AUTO_GAMMA, [SLOW, automatic([1, 1, 1], gamma=0)], SLOW, None, [1, 1, 1], {"best gamma, budget": "plain"}),
        (AUTO_GAMMA, [NEAR, FAR, AUTO], NEAR, FAR, [1, 0.75, 0.75], {"gamma, budget": "4, 512"}),
    ],
    ids=["auto: its own budget", "auto budget: any", "plain decoding is the best", "without gamma 3, the nearest"],
)
def test_what_an_automatic_mode_is_held_against(mode, rows, usual, best, ratios, shown):
    (found,) = against_fixed(mode, [cell(*rows)])
    assert found["ratios"] == pytest.approx(ratios) and found["usual"] == usual
    assert found["best"] == best if best else found["best"]["way"] == "plain"
    assert cells_of(found).items() >= shown.items()


def test_a_record_without_the_way_is_left_out():
    records = [cell(LARGE, AUTO), {"benchmark": "cost_model"}]
    assert against_fixed(AUTO_BUDGET, records) == []
    measured = "against the best of the measured budgets: not measured"
    assert section_of(AUTO_BUDGET, records) == f"`--gamma auto --draft_budget auto`, {measured}."


@pytest.mark.parametrize("ratio,says", [(0.96, "no median lies below"), (0.9496, "2 of 2 medians below")])
def test_the_summary_says_how_many_fall_short(ratio, says):
    auto = automatic([ratio] * 3)
    found = against_fixed(AUTO_GAMMA, [cell(SLOW, auto), cell(SLOW, auto, B=8)])
    assert f"{says}; the lowest median is {ratio:.4f}" in summary(found)


def test_every_cache_of_a_cell_is_planned_for():
    """One for each fixed pair, one for `auto`, and one for each budget that `auto budget` chooses among."""
    flags = Flags(gammas=(1, 9), budgets=(16, 40))
    drafts = flags.draft.variants(*flags.drafts().values())
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    planned = resolve_several(RunConfig(target, sizes=Sizes(2, 200)), drafts).draft
    assert planned is not None and sum(planned.capacities) == 2 * 16 + 2 * 40 + 40 + 64 + 128
    assert (planned.gamma, planned.capacity) == (9, 128)
