"""The published facts and their formula, and the scripts that set measurements beside them."""

import json
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest
from published_runs import BUILT_IN, LLAMA, words

from reproduce import acceptance_tables, speedup_tables
from reproduce.paper import reproduction
from reproduce.paper.columns import by_size
from reproduce.paper.figures import PUBLISHED, acceptance_curves
from reproduce.paper.published import pairs_of, published, same_context, speedup, target_name
from reproduce.sweeping.cells import cells_of, read_grid
from reproduce.sweeping.runner import read_rows

RESULTS = reproduction.ROOT / "reproduce" / "results"
SCRIPTS = [speedup_tables, acceptance_tables]
SHORT = ("--axis", "prefix_len=1000")
TWO_ROWS = ("--axis", "B=2", *SHORT)


def test_the_facts_are_all_there():
    facts = published()
    assert Counter(fact["origin"] for fact in facts.speedups) == {"8xA100": 11, "8xH100": 8, "figure 6, 8xA100": 58}
    assert {pair: len(known) for pair, known in pairs_of(facts.figure_6).items()} == {
        ("LLaMA-2-7B-32K", "TinyLlama-1.1B"): 25,
        ("LLaMA-2-7B-32K", "self"): 13,
        ("Llama-3.1-8B", "self"): 20,
    }
    assert Counter(fact["kind"] for fact in facts.ratios) == {"verify": 12, "draft": 9}
    by_context = {fact["prefix_len"]: fact["value"] for fact in facts.acceptance}
    assert len(by_context) == 6 and (by_context[4000], by_context[8000], by_context[32000]) == (0.84, 0.83, 0.81)
    assert [*pairs_of(facts.acceptance)] == [("Llama-3.1-8B", "self")]
    assert sum(fact["value"] < 1 for fact in facts.figure_6) == 10 and min(f["value"] for f in facts.figure_6) == 0.76
    assert all(type(fact["B"]) is type(fact["prefix_len"]) is int for fact in facts.speedups)
    assert all(0.7 < fact["value"] < 2.1 for fact in facts.speedups)
    assert len({(fact["origin"], *by_size(fact)) for fact in facts.speedups}) == len(facts.speedups)


def test_models_are_recognised_by_the_names_of_their_checkpoints():
    for name in ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"):
        assert target_name({"model": name}) == "Llama-3.1-8B"
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "SmolLM2-135M-Instruct", None):
        assert target_name({"model": name}) == str(name)
    assert same_context(8000, 8192) and not same_context(4000, 8000)


def test_the_published_formula():
    assert speedup(0.8, 3, 0.1, 1.2) == pytest.approx(2.952 / 1.5)
    assert speedup(1, 4, 0.25, 1.5) == pytest.approx(5 / 2.5)


def test_speedups_are_set_side_by_side_losses_included(runs):
    text = runs(speedup_tables, "--axis", "B=1,4", *SHORT)
    assert runs.ended.code == 0
    # target, draft, context, rows, gamma, budget, weights, measured, last row, the formula, alpha.
    rest = ["0.70*", f"{2.952 / (3 * 0.25 + 1.5):.2f}", "0.800"]
    own = [row[:11] for row in words(text, BUILT_IN, "self")[:2]]
    assert own == [
        [BUILT_IN, "self", "1000", "1", "3", "512", "bfloat16", "0.80*", *rest],
        [BUILT_IN, "self", "1000", "4", "3", "512", "bfloat16", "1.30", *rest],
    ]
    rows = [row for row in words(text, "8xA100", LLAMA, "self", "32000", "32")]
    assert [row[5:8] for row in rows] == [["3", "1.22", "1.25"]] and rows[0][-2:] == ["not", "measured"]
    assert "0.76*" in text and "0.945*" in text and "slower than plain" in text
    assert len(words(text, "8xA100")) + len(words(text, "8xH100")) + len(words(text, "figure")) == 77


def test_the_same_model_stands_in_the_published_row(runs):
    runs.model = "meta-llama/Meta-Llama-3.1-8B"
    text = runs(speedup_tables, "--axis", "B=32", "--axis", "prefix_len=32768")
    (row,) = words(text, "8xA100", LLAMA, "self", "32000", "32")
    assert " ".join(row[5:]) == "3 1.22 1.25 (+2%) 1.30 (a CPU, 2 cores, gamma 3, 32768 tokens)"


def test_a_draft_model_has_a_grid_of_its_own_and_all_shows_both(runs):
    draft = ("--grid", str(reproduction.GRIDS / "speedups_draft.toml"), "--axis", "B=2", *SHORT)
    runs(speedup_tables, *TWO_ROWS)
    only, every = (runs(speedup_tables, *draft, *flags) for flags in ((), ("--all",)))
    drafts = [[row[1] for row in words(text, BUILT_IN) if row[2:4] == ["1000", "2"]] for text in (only, every)]
    assert drafts == [["SmolLM2-draft"] * 3, ["self", "SmolLM2-draft"] * 3]


def test_costs_and_throughput_are_shown_of_the_same_runs(runs):
    text = runs(speedup_tables, "--axis", "B=1,4", *SHORT)
    assert [cell.given["B"] for cell in runs.measured] == [1, 4]
    _, _, *costs, one, four = [row[7:] for row in words(text, BUILT_IN)]
    assert costs == [["100.00", "25.00", "150.00", "240.00", "1.50", "0.25"]] * 2
    assert ["2.45", "not", "measured"] in [[row[-5], *row[-2:]] for row in words(text, "verification")]
    # Plain ms and tokens/s, then a round of 240 ms over 2.952 tokens.
    assert [one, four] == [["100.0", "10.0", "81.3", "12.3"], ["100.0", "40.0", "81.3", "49.2"]]


@pytest.mark.parametrize("name", ["speedups", "speedups_draft", "acceptance", "cost_model"])
def test_what_is_recorded_would_not_run_again(name):
    """The committed rows are of the grids' cells: a changed key would measure all of them anew."""
    keys = {cell.key for cell in cells_of(read_grid(reproduction.GRIDS / f"{name}.toml"), {}, {})}
    assert keys and keys <= read_rows(RESULTS / f"{name.removesuffix('_draft')}.jsonl").keys()


def test_a_curve_goes_from_short_to_long_contexts_in_whatever_order_they_were_measured():
    row = {"model": "M", "draft_policy": "streaming", "text": "book"}
    rows = [row | {"prefix_len": length, "acceptance_rate": length / 1e4} for length in (4000, 1000, 2000)]
    (curve,) = acceptance_curves([], rows, "prefix_len")
    assert (list(curve.x), list(curve.y)) == ([1000, 2000, 4000], [0.1, 0.2, 0.4])


def test_acceptance_by_context_and_by_budget(runs):
    text = runs(acceptance_tables, "--fixed", 'texts=["greedy"]', "--fixed", 'policies=["streaming"]')
    assert runs.ended.code == 0
    own = [row for row in words(text, BUILT_IN)]
    assert sorted(((row[2], row[5], row[8]) for row in own), key=lambda row: tuple(map(float, row))) == [
        *(("1000", "512", "0.756"), ("2000", "512", "0.756"), ("4000", "64", "0.532")),
        *(("4000", "128", "0.564"), ("4000", "256", "0.628"), ("4000", "512", "0.756")),
    ]
    (row,) = words(text, LLAMA, "self", "4000")
    assert " ".join(row[3:]) == "0.84 not measured 0.756 (greedy text, a CPU, 2 cores)"


@pytest.mark.parametrize("script", SCRIPTS)
def test_figures_are_png_and_svg_and_the_same_each_time(runs, script, tmp_path):
    names = [f"{name}.{kind}" for name in script.FIGURES for kind in ("png", "svg")]

    def drawn() -> list[bytes]:
        runs(script, *SHORT, draws=True)
        assert runs.ended.code == 0
        return [(tmp_path / "figures" / name).read_bytes() for name in names]

    files = drawn()
    for png, svg in zip(files[::2], files[1::2], strict=True):
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert drawn() == files


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_measurements_there_are_only_published_points(script):
    panels = [panel for draw in script.FIGURES.values() for panel in draw([]).panels]
    assert all(PUBLISHED.items() <= series.style.items() for panel in panels for series in panel.series)
    assert "not measured" in script.table([])


def test_published_points_are_open_and_measured_ones_filled(runs, tmp_path):
    runs(speedup_tables, "--axis", "B=1,2", *SHORT)
    rows = [json.loads(line) for line in (tmp_path / reproduction.SPEEDUPS).read_text().splitlines()]
    shown = speedup_tables.speedup_figure([row["record"] for row in rows])
    series = [series for panel in shown.panels for series in panel.series]
    known = [one for one in series if PUBLISHED.items() <= one.style.items()]
    assert known == [one for one in series if one.label.startswith("published")]
    # In both panels of self-speculation, and not in that of a draft model.
    own = [(list(one.x), list(one.y)) for one in series if one not in known]
    assert own == [([1, 2], [0.8, 1.3])] * 2
    assert sum(len(one.x) for one in known) == len(published().figure_6)


def test_records_have_a_folder_where_none_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "REPRODUCTION", tmp_path / "reproduction")
    runs(speedup_tables, *TWO_ROWS, "--output", f"{tmp_path}/reproduction/speedups.jsonl")
    assert runs.ended.code == 0 and (tmp_path / "reproduction/speedups.jsonl").is_file()


def test_a_cell_that_fails_is_named_the_others_are_shown_and_without_others_the_figure_stays(runs, tmp_path):
    text = runs(speedup_tables, "--axis", "B=2,13", *SHORT, draws=True)
    assert runs.ended.code == 1 and "thirteen rows" in text and "--retry_failed" in text
    assert {row[3] for row in words(text, BUILT_IN)} == {"2"}
    figure = tmp_path / "figures" / "speedup_tables.png"
    before = figure.read_bytes()
    text = runs(speedup_tables, "--axis", "B=13", *SHORT, draws=True)
    assert runs.ended.code == 1 and "thirteen rows" in text and BUILT_IN not in text
    assert figure.read_bytes() == before


@pytest.mark.parametrize("flags", ["--grid nowhere.toml", "--axis B", "--timeout 0", "--nope"])
def test_what_a_user_gets_wrong_is_told_before_anything_runs(runs, flags):
    runs(speedup_tables, *flags.split())
    assert "fix:" in runs.ended.refusal and not runs.measured


def test_without_matplotlib_nothing_is_measured(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs(speedup_tables, *TWO_ROWS)
    assert "pip install" in runs.ended.refusal and not runs.measured
