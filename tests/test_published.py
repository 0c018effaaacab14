"""The published facts and their formula, and the scripts that set measurements beside them."""

import sys
from collections import Counter
from xml.etree import ElementTree

import pytest
from published_runs import BUILT_IN, LLAMA, words

from reproduce import acceptance_tables, speedup_tables
from reproduce.paper import reproduction
from reproduce.paper.columns import by_size
from reproduce.paper.figures import PUBLISHED
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


def test_only_chosen_cells_are_shown(runs):
    both, chosen = (runs(speedup_tables, "--axis", "B=1,2", *SHORT, *flags) for flags in ((), ("--only", "B=2")))
    shown = [{row[3] for row in words(text, BUILT_IN) if row[2] == "1000"} for text in (both, chosen)]
    assert shown == [{"1", "2"}, {"2"}]


@pytest.mark.parametrize("name", ["speedups", "speedups_draft", "acceptance", "cost_model"])
def test_what_is_recorded_would_not_run_again(name):
    """The committed rows are of the grids' cells: a changed key would measure all of them anew."""
    keys = {cell.key for cell in cells_of(read_grid(reproduction.GRIDS / f"{name}.toml"), {}, {})}
    assert keys and keys <= read_rows(RESULTS / f"{name.removesuffix('_draft')}.jsonl").keys()


def test_every_cell_of_policies_has_a_row_if_an_older_one():
    """Sampled rows were measured in rejection mode, so that their keys are not those of today's cells."""
    cells = cells_of(read_grid(reproduction.GRIDS / "policies.toml"), {}, {})
    rows = read_rows(RESULTS / "policies.jsonl").values()
    assert all(any(row["flags"] == cell.flags for row in rows) for cell in cells)


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
    panels = {name: draw([]).panels for name, draw in script.FIGURES.items()}
    drawn = {name: [series for panel in of_one for series in panel.series] for name, of_one in panels.items()}
    assert all(PUBLISHED.items() <= one.style.items() and one.x for series in drawn.values() for one in series)
    assert {name for name, series in drawn.items() if not series} <= {"throughput_latency"}
    assert "not measured" in script.table([])


def test_runs_without_a_budget_leave_the_figure_by_budget_to_the_published_point():
    row = {"draft_policy": "full", "draft_budget": None, "text": "book", "acceptance_rate": 0.9, "prefix_len": 7500}
    (panel,) = acceptance_tables.budget_figure([{"model": LLAMA, "prefix_len": 7500, "rows": [row]}]).panels
    (known,) = panel.series
    assert (panel.title, known.label) == ("context of 4000 tokens", "published, Llama-3.1-8B, streaming")
    assert ([*known.x], [*known.y]) == ([512], [0.84])


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
