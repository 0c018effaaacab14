"""The published facts and their formula, the page made of them, and the scripts that set measurements beside them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from common.errors import ConfigError
from engine.cost_model.costs import tokens_per_round
from reproduce import (
    acceptance_by_budget,
    acceptance_by_context,
    cost_ratios,
    published_page,
    speedup_tables,
    throughput_latency,
)
from reproduce.pages.page_records import GPU
from reproduce.paper import figures, reproduction
from reproduce.paper.published import published, same_context, speedup
from reproduce.paper.reproduction import NONE

ORIGIN = {"git_commit": "0123456789abcdef", "machine": "a CPU, 2 cores", "gpu": None, "torch_version": "2.13"}
BUILT_IN, LLAMA = "SmolLM2-135M-Instruct", "Llama-3.1-8B"
SPECULATION = (speedup_tables, cost_ratios, throughput_latency)
ACCEPTANCE = (acceptance_by_context, acceptance_by_budget)
# A benchmark in no time: its flags come back in a record whose speedup is 0.8 where one row decodes, else 1.3.
FAKE_BENCHMARK = """
import argparse, json, sys
parser = argparse.ArgumentParser()
for flag in ("B", "prefix_len", "gen_len", "gamma", "streamingllm_budget"):
    parser.add_argument("--" + flag, type=int)
for flag in ("model", "target"):
    parser.add_argument("--" + flag)
parser.add_argument("--benchmark", action="store_true")
args = parser.parse_args()
if args.B == 13:
    sys.exit("error: thirteen rows")
open(__file__ + ".runs", "a").write("x")
print(json.dumps({origin} | {{
    "benchmark": "fake", "model": "SmolLM2-135M-Instruct", "draft_model": {draft}, "load_format": "pth", "B": args.B,
    "prefix_len": args.prefix_len, "gamma": args.gamma, "draft_budget": args.streamingllm_budget,
    "draft_dtype": "bfloat16", "draft_weights": None, "dtype": "float32", "kv_dtype": "float32", "dataset": "default",
    "speedup": 0.8 if args.B == 1 else 1.3, "wall_speedup": 0.7, "acceptance_rate": 0.8, "mean_accepted_length": 2.952,
    "baseline_step_ms": 100.0, "draft_step_ms": 25.0, "verify_step_ms": 150.0, "round_ms": 240.0,
    "baseline_tokens_per_second": 10.0 * args.B, "decode_tokens_per_second": 12.3 * args.B,
    "identical_sequences": args.B, "sequences": args.B, "distinct_4gram_fraction": 0.8}}))
"""
FAKE_ACCEPTANCE = """
import argparse, json
parser = argparse.ArgumentParser()
for flag in ("B", "prefix_len", "gen_len", "gamma"):
    parser.add_argument("--" + flag, type=int)
parser.add_argument("--budgets", type=int, nargs="+")
for flag in ("policies", "texts"):
    parser.add_argument("--" + flag, nargs="+")
args = parser.parse_args()
rows = [
    {{"text": text, "temperature": 0.0, "draft_policy": policy, "draft_budget": budget, "judged": 300,
     "acceptance_rate": 0.5 + budget / 2000, "acceptance_per_position": [0.9, 0.8], "mean_accepted_length": 3.1,
     "distinct_4gram_fraction": 0.75}}
    for text in args.texts for policy in args.policies for budget in args.budgets
]
print(json.dumps({origin} | {{"benchmark": "acceptance", "model": "SmolLM2-135M-Instruct", "B": args.B,
    "prefix_len": args.prefix_len, "gamma": args.gamma, "draft_dtype": "bfloat16", "draft_weights": None,
    "dataset": "default", "rows": rows}}))
"""
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Run:
    """Runs a script with fake benchmarks below it; returns what it printed. Its exit code is in `run.code`."""
    save = figures.save
    for name, draft, text in (
        ("SELFSPEC", "None", FAKE_BENCHMARK),
        ("LONGSPEC", "'SmolLM2-draft'", FAKE_BENCHMARK),
        ("ACCEPT", "", FAKE_ACCEPTANCE),
    ):
        script = tmp_path / f"{name.lower()}.py"
        script.write_text(text.format(origin=ORIGIN, draft=draft))
        monkeypatch.setattr(reproduction, name, str(script))
    monkeypatch.setattr(reproduction, "DEFAULT_DRAFT", tmp_path / "no draft")

    def start(script: ModuleType, *flags: str, draws: bool = False) -> str:
        monkeypatch.setattr(figures, "save", save if draws else lambda figure, name, folder: [])
        file = reproduction.ACCEPTANCE if script in ACCEPTANCE else reproduction.SPEEDUPS
        own = ["--output", str(tmp_path / file), "--figures", str(tmp_path / "figures")]
        monkeypatch.setattr(sys, "argv", [script.NAME, *own, *flags])
        try:
            script.main()
            start.code = 0
        except SystemExit as end:
            start.code = end.code
        said = capsys.readouterr()
        return said.out + said.err

    return start


def words(text: str, *starts: str) -> list[list[str]]:
    """The words of every line that starts with these."""
    return [line.split() for line in text.splitlines() if line.split()[: len(starts)] == list(starts)]


def test_the_facts_are_all_there():
    facts = published()
    assert Counter(row.machine for row in facts.speedup_tables) == {"8xA100": 11, "8xH100": 8}
    assert Counter((row.target, row.draft) for row in facts.figure_6) == {
        ("LLaMA-2-7B-32K", "TinyLlama-1.1B"): 25,
        ("LLaMA-2-7B-32K", "self"): 13,
        ("Llama-3.1-8B", "self"): 20,
    }
    assert Counter(row.kind for row in facts.ratios) == {"verify": 12, "draft": 9}
    assert [(row.context, row.alpha) for row in facts.acceptance][:2] == [(4000, 0.84), (8000, 0.83)]
    assert len(facts.acceptance) == 6 and facts.alpha("Llama-3.1-8B", "self", 32000) == 0.81
    assert facts.alpha("LLaMA-2-7B-32K", "self", 32000) is None
    assert sum(row.speedup < 1 for row in facts.figure_6) == 10
    assert min(row.speedup for row in facts.figure_6) == 0.76
    for row in (*facts.speedup_tables, *facts.figure_6):
        assert (type(row.context), type(row.B), type(row.speedup)) == (int, int, float) and 0.7 < row.speedup < 2.1
        assert row.gamma is None or type(row.gamma) is int
    settings = [(row.machine, speedup_tables.setting_of(row)) for row in facts.speedup_tables]
    assert len(set(settings)) == len(settings)
    with pytest.raises(FrozenInstanceError):
        facts.speedup_tables[0].speedup = 3.0


def test_models_are_recognised_by_the_names_of_their_checkpoints():
    facts = published()
    for name in ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"):
        assert facts.is_model("Llama-3.1-8B", name)
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "SmolLM2-135M-Instruct", None):
        assert not facts.is_model("Llama-3.1-8B", name)
    assert same_context(8000, 8192) and not same_context(4000, 8000)


@pytest.mark.parametrize(
    ("alpha", "gamma", "expected"),
    [(0.8, 3, 2.952), (1, 4, 5), (0, 3, 1), (0.5, 1, 1.5), (0.81, 3, 2.997541), (0.9, 0, 1)],
)
def test_tokens_per_round(alpha, gamma, expected):
    assert tokens_per_round(alpha, gamma) == pytest.approx(expected, abs=1e-9)


def test_the_published_formula():
    assert speedup(0.8, 3, 0.1, 1.2) == pytest.approx(2.952 / 1.5)
    assert speedup(1, 4, 0.25, 1.5) == pytest.approx(5 / 2.5)


@pytest.mark.parametrize(
    "call", [lambda: tokens_per_round(1.2, 3), lambda: tokens_per_round(0.5, -1), lambda: speedup(0.5, 3, 0, 0)]
)
def test_numbers_that_the_formula_does_not_have_are_refused(call):
    with pytest.raises(ConfigError, match="required:"):
        call()


def test_the_committed_page_is_what_its_records_say():
    assert published_page.PAGE.read_text(encoding="utf-8") == published_page.page(), "reproduce/published_page.py"


def test_speedups_are_set_side_by_side_losses_included(run):
    text = run(speedup_tables, "--B", "1", "4", "--prefix_len", "1000")
    assert run.code == 0
    own = words(text, BUILT_IN, "self")
    # target, draft, context, rows, gamma, budget, three published columns, measured, last row, alpha, the formula.
    formula = f"{2.952 / (3 * 0.25 + 1.5):.2f}"
    assert own == [
        ["SmolLM2-135M-Instruct", "self", "1000", "1", "3", "512", "-", "-", "-", "0.80*", "0.70*", "0.800", formula],
        ["SmolLM2-135M-Instruct", "self", "1000", "4", "3", "512", "-", "-", "-", "1.30", "0.70*", "0.800", formula],
    ]
    row = ["Llama-3.1-8B", "self", "32000", "32", "3", "512", "1.22", "1.23", "1.22", "not", "measured", "-", "-", "-"]
    assert row in words(text, LLAMA)
    assert "0.76*" in text and "0.945*" in text
    known = {fact for column in speedup_tables.published_columns().values() for fact in column}
    assert len(words(text, LLAMA)) + len(words(text, "LLaMA-2-7B-32K")) == len(known)
    assert "Another model on another machine" in text and "a CPU, 2 cores" in text and "slower than plain" in text


def test_the_same_model_stands_in_the_published_row(run, tmp_path):
    script = Path(reproduction.SELFSPEC)
    script.write_text(script.read_text().replace("SmolLM2-135M-Instruct", "meta-llama/Meta-Llama-3.1-8B"))
    text = run(speedup_tables, "--B", "32", "--prefix_len", "32768")
    rows = [row for row in words(text, LLAMA, "self", "32000", "32")]
    assert [row[4:] for row in rows] == [["3", "512", "1.22", "1.23", "1.22", "1.30", "0.70*", "0.800", "1.31"]]
    assert "Another model" not in text
    row = page_row(published_page.page(tmp_path, tmp_path), "Speedups on 8xA100", "Llama-3.1-8B | self | 32000 | 32 |")
    assert "| 1.22 | [1.30](results/speedups.jsonl) (a CPU, 2 cores, gamma 3, 32768 tokens) |" in row
    assert row.endswith("| - |")  # and it is not the built-in model


def test_a_draft_model_is_measured_where_it_is_given_and_else_missed_aloud(run, tmp_path):
    sizes = ("--B", "1", "2", "--prefix_len", "1000", "--draft_B", "2")
    text = run(speedup_tables, *sizes)
    assert "without a draft model" in text and not words(text, BUILT_IN, "SmolLM2-draft")
    draft = tmp_path / "model.pth"
    draft.write_bytes(b"")
    text = run(speedup_tables, *sizes, "--draft_model", str(draft))
    assert "without a draft model" not in text
    assert [row[2:4] for row in words(text, BUILT_IN, "SmolLM2-draft")] == [["1000", "2"]]


def test_three_scripts_share_their_cells(run):
    sizes = ("--B", "1", "4", "--prefix_len", "1000")
    texts = [run(script, *sizes) for script in SPECULATION]
    assert Path(reproduction.SELFSPEC + ".runs").read_text() == "xx"
    ratios = words(texts[1], "verification", "/", "plain", "step", "SmolLM2-135M-Instruct")
    assert [row[-2:] for row in ratios] == [["-", "1.50"]] * 2
    assert ["2.45", "not", "measured"] in [row[-3:] for row in words(texts[1], "verification")]
    drafts = words(texts[1], "draft", "step", "/", "plain", "step", "SmolLM2-135M-Instruct")
    assert [row[-2:] for row in drafts] == [["-", "0.25"]] * 2
    # plain ms and tokens/s, then a round of 240 ms over 2.952 tokens.
    assert [row[-4:] for row in words(texts[2], "SmolLM2-135M-Instruct")] == [
        ["100.0", "10.0", "81.3", "12.3"],
        ["100.0", "40.0", "81.3", "49.2"],
    ]


def test_all_shows_records_of_other_cells_too(run):
    run(speedup_tables, "--B", "1", "--prefix_len", "1000")
    only = run(speedup_tables, "--B", "2", "--prefix_len", "1000")
    both = run(speedup_tables, "--B", "2", "--prefix_len", "1000", "--all")
    assert [len(words(text, BUILT_IN)) for text in (only, both)] == [1, 2]


def test_a_curve_goes_from_short_to_long_contexts_in_whatever_order_they_were_measured():
    row = {"model": "M", "draft_policy": "streaming", "text": "book"}
    rows = [row | {"prefix_len": length, "acceptance_rate": length / 1e4} for length in (4000, 1000, 2000)]
    (curve,) = acceptance_by_context.curves(rows, "prefix_len")
    assert (list(curve.x), list(curve.y)) == ([1000, 2000, 4000], [0.1, 0.2, 0.4])


def test_acceptance_by_context(run):
    text = run(acceptance_by_context, "--prefix_len", "1000", "4000", "--texts", "greedy")
    assert run.code == 0
    assert [row[1:] for row in words(text, BUILT_IN, "4000")] == [
        ["4000", "512", "streaming", "greedy", "0.84", "0.756", "300", "0.75"],
        ["4000", "512", "snapkv", "greedy", "-", "0.756", "300", "0.75"],
    ]
    assert words(text, BUILT_IN, "1000", "512", "streaming") == [
        [BUILT_IN, "1000", "512", "streaming", "greedy", "-", "0.756", "300", "0.75"]
    ]
    assert words(text, LLAMA, "32000") == [
        [LLAMA, "32000", "512", "streaming", "-", "0.81", "not", "measured", "-", "-"]
    ]


def test_acceptance_by_budget(run):
    text = run(acceptance_by_budget, "--draft_budget", "64", "512", "--texts", "book", "--policies", "streaming")
    assert [row[1:] for row in words(text, BUILT_IN)] == [
        ["4000", "64", "streaming", "book", "-", "0.532", "300", "0.75"],
        ["4000", "512", "streaming", "book", "0.84", "0.756", "300", "0.75"],
    ]


@pytest.mark.parametrize("script", [*SPECULATION, *ACCEPTANCE], ids=lambda script: script.NAME)
def test_figures_are_png_and_svg_and_the_same_each_time(run, script, tmp_path):
    def drawn() -> list[bytes]:
        run(script, "--B", "2", "--prefix_len", "1000", draws=True)
        assert run.code == 0
        return [(tmp_path / "figures" / f"{script.NAME}.{kind}").read_bytes() for kind in ("png", "svg")]

    png, svg = drawn()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert drawn() == [png, svg]


@pytest.mark.parametrize("script", [*SPECULATION, *ACCEPTANCE], ids=lambda script: script.NAME)
def test_without_measurements_there_are_only_published_points(script):
    shown = script.figure([])
    assert all(series.is_published for panel in shown.panels for series in panel.series)
    assert "not measured" in script.table([]) or script is throughput_latency


def test_published_points_are_open_and_measured_ones_filled(run, tmp_path):
    run(speedup_tables, "--B", "1", "2", "--prefix_len", "1000")
    rows = [json.loads(line) for line in (tmp_path / reproduction.SPEEDUPS).read_text().splitlines()]
    shown = speedup_tables.figure([row["record"] for row in rows])
    series = [series for panel in shown.panels for series in panel.series]
    assert {one.is_published for one in series if one.label.startswith("published")} == {True}
    own = [one for one in series if not one.is_published]
    # In both panels of self-speculation, and not in that of a draft model.
    assert [(one.x, one.y) for one in own] == [([1, 2], [0.8, 1.3])] * 2
    assert sum(len(one.x) for one in series if one.is_published) == len(published().figure_6)


def test_a_cell_that_fails_is_named_and_the_others_are_shown(run):
    text = run(speedup_tables, "--B", "2", "13", "--prefix_len", "1000")
    assert run.code == 1
    assert "thirteen rows" in text and "--retry_failed" in text
    assert [row[3] for row in words(text, BUILT_IN)] == ["2"]


def test_records_have_a_folder_where_none_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "REPRODUCTION", tmp_path / "reproduction")
    run(speedup_tables, "--B", "2", "--prefix_len", "1000", "--output", f"{tmp_path}/reproduction/speedups.jsonl")
    assert run.code == 0 and [file.name for file in (tmp_path / "reproduction").glob("*.jsonl")] == ["speedups.jsonl"]


def test_where_every_cell_fails_the_figure_of_before_stays(run, tmp_path):
    run(speedup_tables, "--B", "2", "--prefix_len", "1000", draws=True)
    figure = tmp_path / "figures" / f"{speedup_tables.NAME}.png"
    before = figure.read_bytes()
    text = run(speedup_tables, "--B", "13", "--prefix_len", "1000", draws=True)
    assert run.code == 1 and "thirteen rows" in text and BUILT_IN not in text
    assert figure.read_bytes() == before


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "nowhere/model.pth"),
        ("--draft_model", "nowhere/model.pth"),
        ("--B", "x"),
        ("--B", "2", "2"),
        ("--nope",),
    ],
    ids=" ".join,
)
def test_what_a_user_gets_wrong_is_told_before_anything_runs(run, flags):
    with pytest.raises(ConfigError, match="fix:"):
        run(speedup_tables, *flags)
    assert not Path(reproduction.SELFSPEC + ".runs").exists()


def test_a_folder_of_figures_that_cannot_be_is_told(tmp_path):
    (tmp_path / "figures").write_text("a file")
    with pytest.raises(ConfigError, match="--figures"):
        figures.save(throughput_latency.figure([]), "any", tmp_path / "figures")


def test_without_matplotlib_nothing_is_measured(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install"):
        run(cost_ratios, "--B", "2", "--prefix_len", "1000")
    assert not Path(reproduction.SELFSPEC + ".runs").exists()


def test_paths_in_the_checkout_are_recorded_without_what_is_above_it(monkeypatch, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "M" / "model.pth"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"")
    monkeypatch.setattr(reproduction, "ROOT", tmp_path)
    monkeypatch.chdir(checkpoint.parent)
    parser = reproduction.speculation_parser("", speedup_tables.SIZES)
    cells = reproduction.speculation_cells(parser.parse_args(["--model", "model.pth", "--draft_model", "model.pth"]))
    models = {flag: {cell.flags.get(flag) for cell in cells} for flag in ("model", "target")}
    assert models == {"model": {"checkpoints/M/model.pth"}, "target": {None, "checkpoints/M/model.pth"}}


def page_row(text: str, title: str, start: str) -> str:
    section = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    found = [line for line in section.splitlines() if line.startswith(f"| {start}")]
    assert len(found) == 1, (title, start)
    return found[0]


def test_the_page_without_records_says_so_of_every_published_number(tmp_path):
    text = published_page.page(tmp_path, tmp_path)
    facts = published()
    rows = [line for line in text.splitlines() if line.startswith(("| Llama", "| LLaMA", "| verif", "| draft step"))]
    assert len(rows) == sum(map(len, (facts.speedup_tables, facts.acceptance, facts.figure_6, facts.ratios)))
    assert all(NONE in row for row in rows)
    assert "predicted [" not in text and "](results/" not in text and "![" not in text
    assert page_row(text, "Figure 6: Llama-3.1-8B, self-speculation, 8xA100", "Llama-3.1-8B | self | 4000 | 128 |")
    assert "| not shown | 0.76* |" in text


def gpu_costs(**other) -> dict:
    record = {"benchmark": "gpu_costs", "part": "d", "status": "done", "model": "meta-llama/Meta-Llama-3.1-8B"}
    record |= {
        "load_format": "dummy",
        "draft_model": None,
        "B": 32,
        "prefix_len": 16000,
        "gamma": 3,
        "draft_budget": 512,
    }
    record |= {"dtype": "bfloat16", "kv_dtype": "bfloat16", "draft_dtype": "bfloat16", "draft_weights": None}
    record |= {
        "baseline_step_ms": 20.0,
        "round_ms": 40.0,
        "draft_step_ms": 4.0,
        "verify_step_ms": 26.0,
        "speedup": None,
    }
    record |= ORIGIN | {"gpu": "NVIDIA X"} | other
    return record | {"cell": json.dumps(record)}


def write_gpu(folder: Path, *records: dict) -> str:
    (folder / GPU).write_text("".join(json.dumps(record) + "\n" for record in records))
    return published_page.page(folder, folder)


def test_predictions_take_measured_costs_and_the_published_acceptance(tmp_path):
    text = write_gpu(tmp_path, gpu_costs(), gpu_costs(prefix_len=32000, kv_dtype="int8"))
    # 1 + .82 + .82^2 + .82^3 over two plain steps a round; and with .81 at 32000 tokens.
    row = page_row(text, "Figure 6: Llama-3.1-8B, self-speculation, 8xA100", "Llama-3.1-8B | self | 16000 | 32 | 2 |")
    assert "predicted" not in row  # at another gamma
    row = page_row(text, "Speedups on 8xH100", "Llama-3.1-8B | self | 32000 | 32 | 3 |")
    shown = "predicted [1.50](results/gpu.jsonl) (acceptance 0.81, NVIDIA X, gamma 3, 32000 tokens, int8 KV)"
    assert f"| 1.23 | {NONE} | {shown} |" in row
    text = write_gpu(tmp_path, gpu_costs(prefix_len=8000))
    row = page_row(text, "Figure 6: Llama-3.1-8B, self-speculation, 8xA100", "Llama-3.1-8B | self | 8000 | 32 |")
    assert f"predicted [{(1 + 0.83 + 0.83**2 + 0.83**3) / 2:.2f}]" in row


@pytest.mark.parametrize(
    "other",
    [
        {"draft_weights": "int4"},
        {"draft_budget": 256},
        {"B": 16},
        {"status": "error"},
        {"model": "Llama-2-7b"},
        {"gamma": "auto"},
    ],
    ids=str,
)
def test_costs_of_something_else_predict_nothing(tmp_path, other):
    assert "predicted [" in write_gpu(tmp_path, gpu_costs(prefix_len=32000))
    assert "predicted [" not in write_gpu(tmp_path, gpu_costs(prefix_len=32000, **other))


def test_random_weights_of_a_sweep_predict_too_and_measure_no_speedup(tmp_path):
    record = gpu_costs(prefix_len=32000) | {"acceptance_rate": None, "sequences": 32}
    chosen = record | {"gamma": "auto", "draft_budget": "auto"}
    row = {"script": reproduction.SELFSPEC, "flags": {}, "status": "ok", "error": None}
    rows = [row | {"key": key, "record": kept} for key, kept in (("a", record), ("b", chosen))]
    rows.append({"key": "c", "status": "failed", "error": "no memory", "record": None})
    (tmp_path / reproduction.SPEEDUPS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = published_page.page(tmp_path, tmp_path)
    row = page_row(text, "Speedups on 8xA100", "Llama-3.1-8B | self | 32000 | 32 |")
    assert f"| 1.22 | {NONE} | predicted [1.50](results/speedups.jsonl) (acceptance 0.81," in row
    own = text.partition("## Measured here")[2]
    assert own.count("| meta-llama/Meta-Llama-3.1-8B |") == 1 and "| 20.0 | 4.0 | 26.0 | 40.0 | 1.30 | 0.20 |" in own
    assert "auto" not in own


def test_ratios_of_the_same_shape_are_measurements(tmp_path):
    other = gpu_costs(draft_step_ms=19.0), gpu_costs(draft_budget=256, draft_step_ms=19.0, draft_weights="int4")
    text = write_gpu(tmp_path, gpu_costs(draft_budget=256), gpu_costs(prefix_len=4096, B=64, gamma=4), *other)
    draft = page_row(text, "Ratios of costs", "draft step / plain step | Llama-3.1-8B | budget 256 | 16384 | 32 |")
    assert "| 0.245 | [0.20](results/gpu.jsonl) (random weights, NVIDIA X, gamma 3, 16000 tokens) |" in draft
    verify = page_row(text, "Ratios of costs", "verification / plain step | Llama-3.1-8B | gamma 4 | 4096 | 64 |")
    assert "| 1.41 | [1.30](results/gpu.jsonl)" in verify


def test_the_built_in_model_stays_in_a_column_of_its_own(run, tmp_path):
    run(speedup_tables, "--B", "32", "--prefix_len", "1000", "4000", draws=True)
    run(acceptance_by_context, "--prefix_len", "4000", "--texts", "greedy")
    text = published_page.page(tmp_path, tmp_path / "figures")
    row = page_row(text, "Figure 6: LLaMA-2-7B-32K, self-speculation, 8xA100", "LLaMA-2-7B-32K | self | 4000 | 48 |")
    assert f"| 1.06 | {NONE} | - | [1.30](results/speedups.jsonl) (32 rows, 4000 tokens, gamma 3, a CPU" in row
    row = page_row(text, "Figure 6: LLaMA-2-7B-32K, self-speculation, 8xA100", "LLaMA-2-7B-32K | self | 4000 | 128 |")
    assert row.endswith(f"| {NONE} | - | - |")  # four times the rows are not near
    row = page_row(text, "Acceptance by context", "Llama-3.1-8B | self | 4000 |")
    assert f"| 0.84 | {NONE} | [0.756](results/acceptance.jsonl) (greedy text, a CPU, 2 cores) |" in row
    assert "| SmolLM2-135M-Instruct | self | 32 | 1000 | 3 | 512 | bfloat16 | 1.30 | 0.70* |" in text
    assert "| SmolLM2-135M-Instruct | self | greedy | snapkv | 512 | 4000 | 4 | 3 | 0.756 | 0.90, 0.80 | 300 |" in text
    assert "![speedup tables](figures/speedup_tables.svg)" in text and "`0123456789ab`" in text
    assert "throughput_latency.svg" not in text  # it was not drawn


def test_check_fails_on_a_stale_page(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "page.md"

    def check(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["page", *flags, "--results", str(tmp_path), "--page", str(stale)])
        try:
            published_page.main()
        except SystemExit as end:
            return end.code
        return 0

    assert check("--check") == 1
    assert "reproduce/published_page.py" in capsys.readouterr().err
    assert check() == 0 and check("--check") == 0
    write_gpu(tmp_path, gpu_costs(prefix_len=32000))
    assert check("--check") == 1
    assert check() == 0 and "1.50" in stale.read_text()


def test_shades_follow_the_order_of_the_values():
    colours = figures.shades([8000, 1000, 4000, 1000])
    assert [colours[value] for value in (1000, 8000)] == [figures.SHADES[0], figures.SHADES[-1]]
    assert len(set(colours.values())) == 3
