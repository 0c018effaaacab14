"""`auto` and SnapKV from the command line: records, what is refused, and the cost model's and acceptance's programs."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_tiny import N_TOKENS, random_model, save_folder
from transformers import MistralConfig

from common.pipes import UNREAD_CODE
from convert_hf_checkpoint import convert
from engine.bench import cost_report
from engine.cost_model.costs import Costs
from engine.cost_model.measure import measure_costs

ROOT = Path(__file__).resolve().parents[1]
SIZES = "--B 2 --prefix_len 60 --gen_len 30 --device cpu --dtype float64"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path, books: Path):
    """Runs a program in this process; its exit code, standard output and standard error."""

    def call(path: str, flags: str) -> tuple[object, str, str]:
        arguments = ["--model", str(checkpoint / "model.pth"), "--dataset", str(books), *flags.split()]
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code: object = 0
        try:
            if path == "engine.cost_model":
                cost_report.main()
            else:
                runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as ending:
            code = ending.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def record_of(done: tuple[object, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


SELFSPEC = "tests/selfspec_benchmark.py"


@pytest.fixture
def drafting_pays(monkeypatch: pytest.MonkeyPatch):
    """Whatever is measured, the smallest budget drafts for nothing, and a verification costs what a step does."""

    def cheap(*args: Any, **kwargs: Any) -> list[Costs]:
        measured = measure_costs(*args, **kwargs)
        n_gammas = len(measured[0].at)
        cheapest = replace(measured[-1], plain_ms=100.0, verify_ms=(100.0,) * n_gammas, draft_ms=0.1, other_ms=0.0)
        return [*(replace(cheapest, draft_ms=90.0) for _ in measured[1:]), cheapest]

    monkeypatch.setattr("engine.bench.passes.measure_costs", cheap)


def drafting(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of rounds that drafted."""
    return [choice for choice in record["choices"] if choice["gamma"]]


@pytest.mark.parametrize("flags", ["--gamma auto", "--gamma auto --draft_policy snapkv --snapkv_window 12"])
def test_gamma_auto_says_what_it_chose_and_why(call, drafting_pays, flags):
    record = record_of(call(SELFSPEC, f"{SIZES} --draft_budget 40 {flags} --benchmark"))
    assert record["gamma"] == "auto" and record["identical_sequences"] == 2
    assert sum(choice["rounds"] for choice in record["choices"]) >= 5
    assert all(0 <= choice["gamma"] <= 6 for choice in record["choices"])
    assert drafting(record) and all(choice["draft_budget"] == 40 for choice in drafting(record))
    (costs,) = record["measured_costs"]
    assert record["measured_costs_seconds"] > 0
    assert costs["gammas"] == [1, 2, 3, 4, 5, 6] and costs["plain_ms"] > 0
    assert costs["draft_budget"] == 40 and 0 <= costs["accepted_share"] <= 1 and costs["places_reached"] > 0


def test_the_budget_is_chosen_among_those_that_leave_something_out(call, drafting_pays):
    """Of 64, 128, ... only those below the prompt, or the smallest: here a prompt of 60 leaves one."""
    record = record_of(call(SELFSPEC, f"{SIZES} --draft_budget auto --gamma 2"))
    assert record["draft_budget"] == "auto" and record["gamma"] == 2 and record["identical_sequences"] == 2
    assert {choice["draft_budget"] for choice in drafting(record)} == {64}
    assert len(record["measured_costs"]) == 1
    longer = "--B 2 --prefix_len 150 --gen_len 40 --device cpu --dtype float64"
    record = record_of(call(SELFSPEC, f"{longer} --draft_budget auto --gamma auto"))
    assert {choice["draft_budget"] for choice in drafting(record)} == {64}  # 128 would cost too much
    assert [costs["draft_budget"] for costs in record["measured_costs"]] == [128, 64]
    assert record["identical_sequences"] == 2


@pytest.mark.parametrize("drafter", ["--draft ngram", "--draft oracle", "--draft_policy full", "--draft_policy snapkv"])
def test_every_drafter_takes_an_automatic_gamma(call, drafting_pays, drafter):
    record = record_of(call(SELFSPEC, f"{SIZES} --gamma auto {drafter}"))
    assert record["identical_sequences"] == 2 and record["gamma"] == "auto" and drafting(record)


def test_a_standalone_draft_with_snapkv_and_an_automatic_gamma(call, checkpoint):
    flags = f"{SIZES} --target {checkpoint}/model.pth --gamma auto --draft_policy snapkv --draft_budget 40"
    record = record_of(call("tests/longspec_benchmark.py", flags))
    assert record["draft_policy"] == "snapkv" and record["identical_sequences"] == 2
    assert record["snapkv_window"] == 32 and record["n_sink"] is None


def test_draft_budget_is_another_name(call):
    one = record_of(call(SELFSPEC, f"{SIZES} --draft_budget 24"))
    other = record_of(call(SELFSPEC, f"{SIZES} --streamingllm_budget 24"))
    assert one["draft_budget"] == other["draft_budget"] == 24 and one["measured_costs_seconds"] is None
    assert one["acceptance_rate"] == other["acceptance_rate"]


REFUSED = {
    "snapkv with sinks": ("--draft_policy snapkv --n_sink 4", ("--n_sink", "self, snapkv", "--snapkv_window")),
    "a window without snapkv": ("--snapkv_window 8", ("--snapkv_window", "self, streaming")),
    "several without effect": (
        "--draft ngram --n_sink 4 --draft_layers 0",
        ("--draft_layers, --n_sink", "0, 4 with draft ngram"),
    ),
    "no room to select": ("--draft_policy snapkv --draft_budget 32", ("budget 32, window 32", "33 or more")),
    "everything by attention": ("--draft_policy snapkv --draft_budget -1", ("-1", "leave out --draft_policy")),
    "a window below a block": ("--draft_policy snapkv --snapkv_window 3 --gamma 4", ("gamma 4, window 3",)),
    "a gamma that is no number": ("--gamma many", ("--gamma", "many")),
    "a budget that is no number": ("--draft_budget lots", ("--draft_budget", "lots")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_flags_are_refused(call, what):
    flags, says = REFUSED[what]
    code, out, err = call(SELFSPEC, f"{SIZES} {flags}")
    assert (code, out) == (2, "")
    for part in (*says, "where:", "seen:", "required:", "fix:"):
        assert part in err
    assert "Traceback" not in err and err.count("error:") == 1


def test_a_standalone_draft_cannot_change_its_budget(call, checkpoint):
    target = f"--target {checkpoint}/model.pth"
    code, _, err = call("tests/longspec_benchmark.py", f"{SIZES} {target} --draft_budget auto")
    assert code == 2 and "reproduce/acceptance.py --draft_model" in err


# What the cost model calls otherwise, as whole words.
BENCHMARK_FLAGS = re.compile(r"--(?:B|prefix_len|gamma|draft_policy|draft_budget|streamingllm_budget)\b")
GRID = "--batches 1 2 --contexts 40 90 --budgets 16 40 --gammas 1 3 --device cpu --dtype float64 --snapkv_window 8"


def test_the_cost_model_prints_costs_a_heat_map_and_what_pays_best(call):
    code, out, err = call("engine.cost_model", f"{GRID} --gen_len 20 --acceptance_rows 1")
    assert code == 0, err
    record = json.loads(out.splitlines()[-1])
    assert len(record["best"]) == 4 and len(record["drafts"]) == 4
    assert len(record["plain_ms"]) == 2 and len(record["draft_ms"][0][0]) == 4
    assert out.count("predicted speedup,") == 4 and "what pays best" in out and out.count(" ± ") == 8
    given = call("engine.cost_model", f"{GRID} --alpha 0.9")
    record = record_of(given)
    assert record["acceptance_rates_by_context"] == [[0.9, 0.9]] * 4 and record["acceptance_of"] == "given"
    assert record["acceptance_judged_by_context"] is None and " ± " not in given[1] and "within noise" not in given[1]


def test_acceptance_is_measured_at_every_context_as_if_it_were_the_only_one(call):
    flags = f"{GRID} --gen_len 20 --acceptance_rows 2"
    both = record_of(call("engine.cost_model", flags))
    alone = record_of(call("engine.cost_model", flags.replace("--contexts 40 90", "--contexts 90")))
    n_rounds, gamma, n_row = len(range(0, 20 - 3 - 1, 3 + 1)), 3, 2
    for rates, judged in zip(both["acceptance_rates_by_context"], both["acceptance_judged_by_context"], strict=True):
        assert len(rates) == len(judged) == 2 and all(0 <= rate <= 1 for rate in rates)
        # The first draft of a block is judged, whatever becomes of it.
        assert all(n_row * n_rounds <= n <= n_row * n_rounds * gamma for n in judged)
        # What was accepted is a whole number of what was judged.
        assert all(abs(rate * n - round(rate * n)) < 1e-4 * n for rate, n in zip(rates, judged, strict=True))
    assert [row[1:] for row in both["acceptance_rates_by_context"]] == alone["acceptance_rates_by_context"]
    assert [row[1:] for row in both["acceptance_judged_by_context"]] == alone["acceptance_judged_by_context"]
    assert any(short != long for short, long in both["acceptance_rates_by_context"])


@pytest.mark.parametrize(
    "flags,says",
    [
        ("--alpha 1.5", ("--alpha", "1.5")),
        ("--gammas 0 3 --alpha 0.5", ("--gammas", ">= 1")),
        ("--gammas -2 --gen_len 1", ("--gammas", "seen:     -2")),
        ("--gammas 2 --gen_len 3", ("--gen_len", ">= 4")),
        ("--gammas 1 12 --gen_len 4", ("--gen_len", ">= 5")),
        # A model of 256 tokens.
        ("--contexts 40 300 --alpha 0.5", ("--contexts, --gen_len and --gammas", "use --contexts 156 or less")),
    ],
)
def test_the_cost_model_refuses(call, flags, says):
    code, _, err = call("engine.cost_model", f"{GRID} {flags}")
    assert code == 2 and all(part in err for part in says), err
    assert "loading" not in err and not BENCHMARK_FLAGS.findall(err)


@pytest.mark.parametrize(
    "flags,named",
    [
        ("--batches 5000 --acceptance_rows 6000 --alpha 0.5", "--batches"),
        ("--batches 1 5000", "--batches"),
        ("--batches 1 --acceptance_rows 5000", "--acceptance_rows"),
    ],
)
def test_the_cost_model_names_the_rows_that_do_not_fit_into_memory(call, monkeypatch, flags, named):
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: 20_000_000)
    code, _, err = call("engine.cost_model", f"{GRID} {flags}")
    assert code == 2 and re.search(rf"use {named} \d+, the largest batch that fits", err), err
    assert not BENCHMARK_FLAGS.findall(err)


def test_a_large_gamma_asks_for_no_more_text_than_is_drafted(call):
    """Where rates are given, no text is drafted; where they are measured, at most three tokens of it a round."""
    sizes = "--batches 1 --contexts 40 --policies streaming --budgets 40 --device cpu"
    assert record_of(call("engine.cost_model", f"{sizes} --gammas 1 20 --alpha 0.8 --gen_len 1"))["gammas"] == [1, 20]
    record = record_of(call("engine.cost_model", f"{sizes} --gammas 1 20 --gen_len 5 --acceptance_rows 1"))
    assert 1 <= record["acceptance_judged_by_context"][0][0] <= 3


def test_the_record_is_kept_where_nobody_reads_the_output(checkpoint, books, tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    sizes = "--batches 1 --contexts 40 --policies streaming --budgets 16 --gammas 1 --alpha 0.8 --device cpu"
    files = ["--model", str(checkpoint / "model.pth"), "--dataset", str(books)]
    files += ["--output", str(tmp_path / "costs.jsonl")]
    command = [sys.executable, "-u", "-m", "engine.cost_model", *sizes.split(), *files]
    with open(write_end, "wb") as nobody:
        done = subprocess.run(command, cwd=ROOT, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert done.returncode == UNREAD_CODE, done.stderr
    assert json.loads((tmp_path / "costs.jsonl").read_text())["benchmark"] == "cost_model"


def test_every_way_of_a_gamma_cell_decodes_the_same_tokens(call, monkeypatch):
    """Fixed pairs, `auto` at the largest budget, and `auto budget`, in turn; and what they chose by which costs."""
    measured: list[list[Costs]] = []

    def kept(*args: Any, **kwargs: Any) -> list[Costs]:
        measured.append(measure_costs(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr("engine.bench.passes.measure_costs", kept)
    sizes = SIZES.replace("--prefix_len 60", "--prefix_len 150")
    cell = "reproduce/gamma_cell.py", f"{sizes} --gammas 1 3 --budgets 16 40 --repeats 2"
    rows = {row["way"]: row for row in record_of(call(*cell))["rows"]}
    assert list(rows)[:2] == ["plain", "b=16 g=1"] and list(rows)[-2:] == ["auto", "auto budget"] and len(rows) == 7
    assert all(row["identical_rows"] == 2 and len(row["tokens_per_second"]) == 2 for row in rows.values())
    auto, both = rows["auto"], rows["auto budget"]
    assert (auto["draft_budget"], auto["budgets"], both["draft_budget"]) == (40, None, "auto")
    # Measured anew in both repeats, the second of which runs in reverse, for one drafter and for two.
    assert [len(costs) for costs in measured] == [1, 2, 2, 1]
    kept_costs = [row["measured_costs"] for row in rows.values()]
    assert kept_costs[:5] == [None] * 5 and [list(map(len, runs)) for runs in kept_costs[5:]] == [[1, 1], [2, 2]]
    plain_ms = [round(measured[run][0].plain_ms, 4) for run in (0, 3)]
    assert [costs["plain_ms"] for (costs,) in auto["measured_costs"]] == plain_ms
    assert len(auto["measured_costs_seconds"]) == 2
    assert {budget for run in both["budgets"] for budget in run} <= {64, 128, None}
    assert [[bool(gamma) for gamma in run] for run in both["gammas"]] == [
        [budget is not None for budget in run] for run in both["budgets"]
    ]
    twice = record_of(call(cell[0], f"{SIZES} --gammas 1 1 --budgets 40 40 --repeats 1"))
    assert [row["way"] for row in twice["rows"]] == ["plain", "b=40 g=1", "auto", "auto budget"]


@pytest.mark.parametrize(
    "flags", ["--budgets 8 128 --gammas 1", "--draft_policy snapkv --budgets 40 --gammas 3", "--gen_len 2 --budgets 40"]
)
def test_an_automatic_budget_does_not_depend_on_the_measured_ones(call, flags):
    rows = record_of(call("reproduce/gamma_cell.py", f"{SIZES} --repeats 1 {flags}"))["rows"]
    (both,) = [row for row in rows if row["way"] == "auto budget"]
    assert {budget for run in both["budgets"] for budget in run} <= {64, None}
    assert [len(costs) for costs in both["measured_costs"]] == [1]


def test_acceptance_on_three_kinds_of_text(call):
    sizes = "--B 2 --prefix_len 80 --gen_len 24 --device cpu --dtype float64 --snapkv_window 8 --gamma 2"
    lists = "--budgets 16 40 --policies streaming snapkv full"
    record = record_of(call("reproduce/acceptance.py", f"{sizes} {lists}"))
    rows = {(row["text"], row["draft_policy"], row["draft_budget"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 3 * (2 * 2 + 1)
    for (text, policy, _), row in rows.items():
        assert row["judged"] > 0 and 0 <= row["distinct_4gram_fraction"] <= 1
        assert row["temperature"] == (0.6 if text == "sampled" else 0)
        # The draft is the target over the same cache, in the same dtype.
        assert row["acceptance_rate"] == 1 or policy != "full"
    assert min(row["acceptance_rate"] for row in rows.values()) < 1
    # The book's text does not depend on who drafts it.
    assert len({row["distinct_4gram_fraction"] for (text, *_), row in rows.items() if text == "book"}) == 1


@pytest.mark.parametrize(
    "flags,says",
    [
        ("--gamma auto", ("--gamma", "auto")),
        ("--gen_len 4", ("--gen_len", "seen:     4")),
        ("--temperature 0", ("--temperature", "sampled")),
        ("--prefix_len 190", ("distinct prompts",)),
    ],
)
def test_acceptance_refuses(call, flags, says):
    code, _, err = call("reproduce/acceptance.py", f"--B 2 --prefix_len 80 --gen_len 24 {flags}")
    assert code == 2 and all(part in err for part in says), err


@pytest.mark.parametrize(
    "path,flags",
    [
        (SELFSPEC, f"{SIZES} --draft_policy snapkv --draft_budget 40"),
        ("engine.cost_model", f"{GRID} --alpha 0.5"),
        ("reproduce/acceptance.py", "--B 2 --prefix_len 80 --gen_len 24 --device cpu --budgets 40"),
    ],
)
def test_a_sliding_window_and_selection_by_attention_do_not_go_together(call, tmp_path, path, flags):
    """Refused before anything is loaded, whichever policy is named first."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=N_TOKENS, sliding_window=32)
    save_folder(random_model(config), tmp_path)
    convert(tmp_path, tmp_path)
    code, _, err = call(path, f"{flags} --model {tmp_path / 'model.pth'}")
    assert code == 2 and "sliding window of 32" in err and "loading" not in err


LATE = {
    "a budget without room, last": (
        "reproduce/acceptance.py",
        "--policies snapkv --budgets 40 20 --gen_len 24",
        ("budget (--budgets) and window (--snapkv_window)", "budget 20"),
    ),
    "a budget that is none": ("reproduce/acceptance.py", "--budgets -1 --gen_len 24", ("where:    --budgets\n",)),
    "a target that is not there": (
        "reproduce/acceptance.py",
        "--draft_model somewhere/model.pth --model nowhere/model.pth --gen_len 24",
        ("where:    --model\n", "nowhere"),
    ),
    "a draft that is not there": (
        "reproduce/acceptance.py",
        "--draft_model nowhere/model.pth --B 1 --prefix_len 80 --gen_len 24",
        ("where:    --draft_model\n", "nowhere"),
    ),
    "a budget without a window": (
        "engine.cost_model",
        "--policies streaming --budgets 4 40 --alpha 0.5",
        ("budget (--budgets) and n_sink (--n_sink)", "budget 4"),
    ),
    "a budget without room": (
        "engine.cost_model",
        "--policies snapkv --budgets 20 --alpha 0.5",
        ("budget (--budgets) and window (--snapkv_window)", "budget 20"),
    ),
    "a window below a block of the cost model": (
        "engine.cost_model",
        "--budgets 40 --gammas 3 60 --alpha 0.5",
        ("gamma (--gammas) and the draft's budget (--budgets)", "gamma 60, window 36"),
    ),
    "a window below a block": ("reproduce/gamma_cell.py", "--budgets 40 --gammas 3 60", ("gamma 60, window 36",)),
    "an automatic budget without room": (
        "reproduce/gamma_cell.py",
        "--budgets 512 --gammas 1 --n_sink 64 --prefix_len 100",
        ("n_sink (--n_sink)", "budget 64, n_sink 64"),
    ),
    "new tokens without a round": (
        "reproduce/gamma_cell.py",
        "--budgets 40 --gammas 3 --gen_len 1",
        ("where:    --gen_len\n",),
    ),
}


@pytest.mark.parametrize("what", LATE)
def test_what_one_of_many_drafts_cannot_do_is_found_first(call, what):
    path, flags, says = LATE[what]
    code, _, err = call(path, f"--device cpu {flags}")
    assert code == 2 and "loading" not in err and err.count("error:") == 1
    assert all(part in err for part in says), err


def test_flags_that_a_program_goes_through_by_itself_are_none_of_its_flags(call):
    for path, flag in (
        ("engine.cost_model", "--B 4"),
        ("engine.cost_model", "--draft ngram"),
        ("reproduce/acceptance.py", "--draft_budget 64"),
        ("reproduce/gamma_cell.py", "--gamma 3"),
    ):
        code, _, err = call(path, flag)
        assert code == 2 and flag.split()[0] in err


def test_the_cost_model_is_run_as_a_module_without_a_warning():
    """It would be imported twice if the package imported it."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.cost_model", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and "--acceptance_rows" in done.stdout
