"""A user's own records, drawn: what is on which axis, which points make a line, what is left out and said to be."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import Ended, run

from reproduce import plot
from reproduce.paper import figures
from reproduce.paper.figures import Figure

SAVE = figures.save


def record(B: int, speedup: float | None, **changes: object) -> dict[str, object]:
    of = {"benchmark": "selfspec", "model": "M", "B": B, "prefix_len": 1000, "gamma": 3, "speedup": speedup}
    return of | {"decode_tokens_per_second": 10.0 * B} | changes


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script on lines of JSON: how it ended, and the figure that it would have drawn."""

    def draw(lines: list[object], *flags: str) -> tuple[Ended, Figure | None]:
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        drawn: list[Figure] = []
        monkeypatch.setattr(figures, "save", lambda figure, name, folder: drawn.append(figure) or [])
        return run("reproduce/plot.py", [str(file), *flags]), next(iter(drawn), None)

    return draw


def points(figure: Figure) -> list[dict[str, list[tuple[float, float]]]]:
    return [{one.label: list(zip(one.x, one.y, strict=True)) for one in panel.series} for panel in figure.panels]


def test_a_line_for_each_combination_of_what_else_varies(draw):
    """Of three repeats the median; a row of a sweep is its record; a failed cell and a null are left out."""
    lines = [record(B, 1.0 + B, prefix_len=length) for length in (1000, 4000) for B in (4, 1, 2)]
    lines += [record(1, 9.0), record(1, 2.5), record(8, None)]
    lines[1] = {"key": "k", "status": "ok", "record": lines[1]}
    lines.append({"key": "l", "status": "failed", "record": None})
    ended, figure = draw(lines)
    speedup, tokens = points(figure)
    assert speedup == {
        "prefix_len 1000": [(1, 2.5), (2, 3.0), (4, 5.0)],
        "prefix_len 4000": [(1, 2.0), (2, 3.0), (4, 5.0)],
    }
    assert tokens["prefix_len 1000"] == [(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)]
    assert [(panel.x_label, panel.y_label) for panel in figure.panels] == [("B", y) for y in plot.MEASURED[:2]]
    colours = figures.shades([8000, 1000, 4000, 1000])
    assert [colours[length] for length in (1000, 8000)] == [figures.SHADES[0], figures.SHADES[-1]]
    assert "speedup over B: 8 of 10 records have both" in ended.out
    assert "per_second over B: 9 of 10 records" in ended.out


def test_options_of_policies_and_drafters_are_settings_too(draw):
    lines = [record(B, 2.0, draft_of_draft=inner, refresh=4) for inner in ("ngram", "streaming") for B in (1, 2)]
    _, figure = draw(lines)
    assert [*points(figure)[0]] == ["draft_of_draft ngram", "draft_of_draft streaming"]
    texts = (["suffix"], None)
    _, figure = draw([record(B, 2.0, text_drafts=beside, text_match=8) for beside in texts for B in (1, 2)])
    assert [*points(figure)[0]] == ["text_drafts ['suffix']", "all"]


def test_options_without_effect_draw_nothing_apart(draw):
    """Older records have them where newer ones have null."""
    idle = {"text_match": 8, "inner_gamma": 2, "inner_budget": 64}
    copies = {"draft_of_draft": "ngram", "inner_gamma": 2}
    for older, newer in ((idle, dict.fromkeys(idle)), (copies | {"inner_budget": 64}, copies)):
        _, figure = draw([record(B, 2.0, **given) for given in (older, newer) for B in (1, 2)])
        assert [*points(figure)[0]] == ["all"]


@pytest.fixture
def drawn_axes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws a figure's first panel, and returns matplotlib's axes."""

    def drawn_axes(figure: Figure) -> Any:
        canvases: list[Any] = []
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda canvas, *to, **how: canvases.append(canvas))
        SAVE(figure, "figure", tmp_path)
        return canvases[0].axes[0]

    return drawn_axes


def judged(policy: str, text: str, rate: float, budget: int = 64) -> dict[str, object]:
    """A row of what acceptance.py records."""
    option = {"n_sink": 4} if policy == "streaming" else {"snapkv_window": 32}
    row = {"text": text, "draft_policy": policy, "draft_budget": budget, "acceptance_rate": rate, **option}
    return row | {"temperature": 0.6 * (text == "sampled"), "verification": "rejection"}


def test_rows_of_acceptance_are_drawn_over_the_budget_or_as_bars_over_the_policies(draw, drawn_axes):
    kinds = [(policy, text) for policy in ("streaming", "snapkv") for text in ("book", "sampled")]
    run_of = {"benchmark": "acceptance", "model": "M", "B": 2, "prefix_len": 1000, "gamma": 3, "temperature": 0.0}
    rows = [judged(*kind, rate=0.5 + 0.1 * place) for place, kind in enumerate(kinds)]
    _, bars = draw([run_of | {"rows": rows}], "--x", "draft_policy")
    assert points(bars) == [
        {
            "text book": [("snapkv", 0.7), ("streaming", 0.5)],
            "text sampled": [("snapkv", 0.8), ("streaming", pytest.approx(0.6))],
        }
    ]
    axes = drawn_axes(bars)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["snapkv", "streaming"]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.7, 0.5, 0.8, 0.6])
    middles = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert middles == pytest.approx([-0.2, 0.8, 0.2, 1.2])
    rows += [judged(*kind, rate=0.9, budget=128) for kind in kinds]
    _, over_budgets = draw([run_of | {"rows": rows}])
    assert over_budgets.panels[0].x_label == "draft_budget"
    assert points(over_budgets)[0]["draft_policy streaming, text book"] == [(64, 0.5), (128, 0.9)]


def test_where_no_number_varies_names_do(draw):
    lines = [record(1, 1.0 + place, draft=draft) for place, draft in enumerate(("self", "ngram", "suffix"))]
    _, figure = draw(lines)
    assert points(figure)[0] == {"all": [("ngram", 2.0), ("self", 1.0), ("suffix", 3.0)]}


def test_budgets_that_differ_between_names_are_told_apart(draw):
    lines = [record(1, 2.0, draft_policy=name, draft_budget=n) for name, n in (("streaming", 64), ("snapkv", 512))]
    _, figure = draw(lines, "--x", "draft_policy")
    assert {*points(figure)[0]} == {"draft_budget 64", "draft_budget 512"}


def test_whole_numbers_are_on_axes_of_whole_numbers(draw, drawn_axes):
    lines = [record(1, None, gamma=gamma, accepted=gamma - 1, acceptance_rate=0.1 * gamma) for gamma in (1, 2, 3)]
    _, figure = draw(lines, "--x", "gamma", "--y", "accepted")
    axes = drawn_axes(figure)
    ticks = [*axes.get_xticks(), *axes.get_yticks()]
    assert ticks and all(tick == round(tick) for tick in ticks)


def test_axes_can_be_named(draw):
    lines = [record(B, None, gamma=gamma, acceptance_rate=0.5) for B in (1, 2, 4) for gamma in ("auto", 0, 5)]
    _, figure = draw(lines, "--x", "gamma", "--y", "acceptance_rate", "speedup")
    assert points(figure) == [{f"B {B}": [(0, 0.5), (5, 0.5)] for B in (1, 2, 4)}]
    assert not figure.panels[0].is_log_x


def test_the_figure_lies_where_it_is_asked_for(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps(record(B, 1.1)) for B in (1, 2)))
    ended = run("reproduce/plot.py", [str(file), "--y", "speedup", "--figures", str(tmp_path / "figures")])
    said = ended.out.splitlines()[1:]
    paths = [tmp_path / "figures" / f"own.{kind}" for kind in ("png", "svg")]
    assert [line.strip() for line in said] == list(map(str, paths)) and all(path.stat().st_size for path in paths)


@pytest.mark.parametrize(
    ("lines", "flags", "what"),
    [
        ([record(1, 1.1), record(1, 1.2)], (), "nothing to draw\n.*\n  seen: +2 records"),
        ([record(1, None), record(2, None)], ("--y", "speedup"), "nothing to draw\n.*\n  seen: +0 records with"),
        ([record(1, 1.1), record(2, 1.2)], ("--x", "draft_bugdet"), "no record has this\n.*\n.*draft_bugdet"),
        ([record(1, 1.1), record(2, 1.2)], ("--y", "acceptance"), "no record has this\n.*\n.*acceptance"),
        ([record(1, 1.1), "text"], (), "this is no record\n  where: .*own.jsonl, line 2\n"),
        ([], ("nowhere.jsonl",), "no record\n.*nowhere.jsonl.*\n  seen: +no such file"),
    ],
    ids=["nothing varies", "nothing was measured", "no such setting", "no such figure", "no record", "no file"],
)
def test_what_cannot_be_drawn_is_told(draw, lines, flags, what):
    assert re.search(what, draw(lines, *flags)[0].refusal)


def test_without_matplotlib_it_says_what_to_install(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended, _ = draw([record(1, 1.1), record(2, 1.2)])
    assert "pip install -r requirements-dev.txt" in ended.refusal
