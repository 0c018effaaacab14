"""The benchmark scripts as a user runs them: the record on the last line of stdout, files, passes, memory."""

import ast
import errno
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoints.loading import read_checkpoint, save_checkpoint
from models.checkpoints.tokenizer import load_tokenizer
from tests.support.programs import BENCHMARKS, ROOT, run

BASELINE, LONGSPEC, SELFSPEC = BENCHMARKS
PREFIX_LEN, GEN_LEN, GAMMA = 60, 12, 3
SIZES = f"--B 2 --prefix_len {PREFIX_LEN} --gen_len {GEN_LEN}"
DRAFT = f"--gamma {GAMMA} --streamingllm_budget 16 --n_sink 4"

OF_DRAFT = {"draft", "draft_policy", "draft_budget"}
OF_ACCEPTANCE = {"acceptance_rate", "acceptance_per_position", "mean_accepted_length"}
OF_SPEEDUP = {"speedup", "wall_speedup"}
OF_BASELINE = {"baseline_tokens_per_second", "baseline_step_ms"}
OF_PHASES = {"draft_step_ms", "verify_step_ms", "other_ms_per_round"}
OF_REAL_WEIGHTS = {"decode_tokens_per_second", "distinct_4gram_fraction"}
KINDS: dict[type, set[str]] = {
    str: {*OF_DRAFT, "benchmark", "model", "verification", "device", "dtype", "attention", "torch_version"},
    int: {"B", "prefix_len", "gen_len", "gamma", "draft_budget", "seed", "tensor_parallel", "tokens_generated"}
    | {"sequences", "identical_sequences", "peak_memory_bytes"},
    float: {"temperature", "prefill_seconds", *OF_ACCEPTANCE, *OF_SPEEDUP, *OF_BASELINE, *OF_PHASES, *OF_REAL_WEIGHTS},
    list: {"acceptance_per_position"},
    bool: {"compile"},
}
MAGICDEC = ["baseline", *(f"{kind}/{name}spec" for kind in ("StreamingLLM", "SnapKV") for name in ("self", "long"))]
PIPED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
KIND_OF = {key: kind for kind, keys in KINDS.items() for key in keys}
USUAL = {"B": 2, "prefix_len": PREFIX_LEN, "gen_len": GEN_LEN, "gamma": GAMMA, "device": "cpu", "compile": False}
USUAL |= {"verification": "greedy", "temperature": 0.0, "tensor_parallel": 1, "torch_version": torch.__version__}


def check_record(record: dict[str, Any], nulls: set[str], **expected: Any) -> None:
    """Every agreed key is there, of its type and as expected, exactly `nulls` are null, and the figures fit."""
    gamma, n_prompts = record["gamma"], record["sequences"]
    assert {key for key in KIND_OF if record[key] is None} == nulls
    assert {key for key, kind in KIND_OF.items() if not isinstance(record[key], kind)} == nulls
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in record.values())
    expected = USUAL | expected
    assert {key: record[key] for key in expected} == expected
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["git_commit"] or "0" * 40)
    assert n_prompts <= record["tokens_generated"] <= n_prompts * GEN_LEN
    if record["acceptance_rate"] is not None:
        assert 0 <= record["accepted"] <= record["drafted"] and 0 <= record["acceptance_rate"] <= 1
        assert len(record["acceptance_per_position"]) == gamma
        assert all(share is None or 0 <= share <= 1 for share in record["acceptance_per_position"])
    if record["mean_accepted_length"] is not None:
        assert 1 <= record["mean_accepted_length"] <= gamma + 1
    if record["speedup"] is not None:
        ratio = record["decode_tokens_per_second"] / record["baseline_tokens_per_second"]
        assert record["speedup"] == pytest.approx(ratio, rel=1e-3, abs=1e-4)


def test_selfspec_with_everything_measured(checkpoint: Path, books: Path, tmp_path: Path) -> None:
    """More prompts than slots, phase times, printed rows, a results file that already has a line."""
    results, saved, logged = (tmp_path / f"{name}.jsonl" for name in ("results", "rows", "verified"))
    results.write_text('{"an": "earlier record"}\n')
    paths = f"--model {checkpoint / 'model.pth'} --dataset {books} --output {results} --save_rows {saved}"
    paths += f" --log_verification {logged}"
    flags = f"{paths} {SIZES} {DRAFT} --num_prompts 5 --dtype float64 --benchmark --printoutput"
    ended = run(SELFSPEC, flags.split())
    record = ended.record
    drafted = {"draft": "self", "draft_policy": "streaming", "draft_budget": 16}
    read = {"model": checkpoint.name, "dtype": "float64", "dataset": str(books), "load_format": "pth"}
    counts = {"sequences": 5, "identical_sequences": 5, "tokens_generated": 5 * GEN_LEN}
    check_record(record, {"seed"}, benchmark="selfspec", **drafted, **read, **counts)
    assert 0 < record["accepted"] < record["drafted"], "some drafts are meant to be right, some wrong"
    said = dict(line.split(": ", 1) for line in ended.lines if re.match(r"row \d|prompt \d", line))
    assert list(said) == [name for row in range(5) for name in (f"prompt {row} ends", f"row {row}")]
    texts = {name: ast.literal_eval(shown) for name, shown in said.items()}
    text = "".join(book.read_text() for book in sorted(books.iterdir()))
    ends = [texts[f"prompt {row} ends"] for row in range(5)]
    assert all(20 < len(end) < PREFIX_LEN and end in text for end in ends), "a token is a byte"
    kept = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [*kept[0]] == ["run", "pass", "row", "finish_reason", "tokens", "text"]
    passes = ("baseline", "speculation", "phase times")
    assert {(row["pass"], row["row"]) for row in kept} == set(product(passes, range(5)))
    assert all(row["text"] == texts[f"row {row['row']}"] for row in kept)
    assert 0 < record["acceptance_standard_error"] < 0.5
    phases = [line.split()[-1] for line in ended.lines if line.startswith("  ms ")]
    shown = ("round_ms", "draft_step_ms", "verify_step_ms", "other_ms_per_round")
    assert phases == [f"{record[name]:.1f}" for name in shown]
    assert tuple(record["contention"]) == passes
    assert all("contended" in seen for seen in record["contention"].values())
    verified = [json.loads(line) for line in logged.read_text().splitlines()]
    assert len(verified) == record["verified"] and sum(line["accepted"] for line in verified) == record["accepted"]
    assert {line["run"] for line in verified} == {record["run"]}
    assert all(0 < line["q"] <= 1 and 0 <= line["p"] <= 1 and line["entropy"] > 0 for line in verified)
    earlier, appended = results.read_text().splitlines()
    assert earlier == '{"an": "earlier record"}' and json.loads(appended) == record


def test_selfspec_without_baseline_over_a_full_draft_cache(call) -> None:
    flags = f"{SIZES} --gamma {GAMMA} --no_baseline --draft_policy full --dtype float64 --model_name org/a-name"
    record = call(SELFSPEC, flags).record
    nulls = {"seed", "identical_sequences", *OF_BASELINE, *OF_SPEEDUP, *OF_PHASES}
    perfect = {"acceptance_rate": 1.0, "acceptance_per_position": [1.0] * GAMMA, "tokens_generated": 2 * GEN_LEN}
    room = PREFIX_LEN + GEN_LEN + GAMMA + 1
    check_record(record, nulls, benchmark="selfspec", sequences=2, model="org/a-name", draft_budget=room, **perfect)


@pytest.mark.parametrize("script", [SELFSPEC, LONGSPEC])
def test_gamma_zero_and_rows_that_end_at_their_end(script: str, call, checkpoint: Path) -> None:
    target = f"--target {checkpoint}" if script == LONGSPEC else ""
    flags = f"{SIZES} --gamma 0 --num_prompts 6 --stop_at_eos --benchmark --dtype float64 {target}"
    record = call(script, flags).record
    counts = {"mean_accepted_length": 1.0, "acceptance_per_position": [], "drafted": 0, "identical_sequences": 6}
    nulls, name = {"seed", "acceptance_rate", "draft_step_ms"}, Path(script).stem.split("_")[0]
    check_record(record, nulls, benchmark=name, sequences=6, gamma=0, **counts)
    assert 6 < record["tokens_generated"] < 6 * GEN_LEN


def test_selfspec_on_random_weights(checkpoint: Path, tmp_path: Path) -> None:
    """The costs are real, what depends on the text is null. No weights, tokenizer or data set are read."""
    shutil.copy(checkpoint / "config.json", tmp_path)
    flags = f"--model {tmp_path} --load_format dummy --device cpu --dtype float32 {SIZES} {DRAFT} --benchmark"
    ended = run(SELFSPEC, f"{flags} --printoutput --save_rows {tmp_path / 'rows.jsonl'}".split())
    nulls = {"seed", *OF_ACCEPTANCE, *OF_SPEEDUP, *OF_REAL_WEIGHTS}
    check_record(ended.record, nulls, benchmark="selfspec", sequences=2, load_format="dummy", dtype="float32")
    assert all(json.loads(line)["text"] is None for line in (tmp_path / "rows.jsonl").read_text().splitlines())


def test_the_baseline_drafts_nothing(call) -> None:
    record = call(BASELINE, f"{SIZES} --num_prompts 3").record
    nulls = {"seed", "identical_sequences", *OF_DRAFT, *OF_ACCEPTANCE, *OF_SPEEDUP, *OF_PHASES}
    check_record(record, nulls, benchmark="baseline", sequences=3, gamma=0, tokens_generated=3 * GEN_LEN)
    assert record["decode_tokens_per_second"] == record["baseline_tokens_per_second"]


@pytest.mark.parametrize("script", MAGICDEC)
def test_commands_of_magicdec(script: str, call, checkpoint: Path) -> None:
    """The flags of its main branch, but --compile, at a small size; paths are rewritten by a line of docs/flags.md."""
    flags = f"--model {checkpoint} --model_name org/name --rank_group 0 --B 2 --prefix_len 60 --max_len 72 --seed 123"
    flags += "" if script == "baseline" else " --gamma 3 --draft_budget 17 --benchmark"
    flags += " --window_size 8" if script.startswith("SnapKV") else ""
    flags += f" --target {checkpoint} --draft_rank_group 0" if script.endswith("longspec") else ""
    page = (ROOT / "docs/flags.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("sed "))
    rewritten = subprocess.run(shlex.split(line)[:3], input=f"tests/{script}_benchmark.py {flags}", **PIPED).stdout
    program, *words = rewritten.split()
    record = call(program, " ".join(words)).record
    assert (record["prefix_len"], record["gen_len"], record["tokens_generated"]) == (60, 12, 24)
    if script != "baseline":
        policy = "snapkv" if "SnapKV" in script else "streaming"
        assert (record["draft_policy"], record["draft_budget"], record["identical_sequences"]) == (policy, 17, 2)
        assert record["config"]["draft"].get("snapkv_window") == (8 if policy == "snapkv" else None)


def test_a_full_disk_loses_nothing_of_a_run(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and record are printed, the record last; one warning while it runs, and one error at its end."""

    def full_disk(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    ended = call(BASELINE, f"{SIZES} --save_rows {tmp_path / 'r'} --output {tmp_path / 'o'}")
    assert ended.code == 2
    assert [json.loads(line)["row"] for line in ended.lines if line.startswith('{"run"')] == [0, 1]
    assert json.loads(ended.out.splitlines()[-1])["benchmark"] == "baseline"
    for kind in ("warning", "error"):
        assert len(re.findall(f"^{kind}: ", ended.err, re.MULTILINE)) == 1


def test_logits_that_are_no_numbers_are_an_error(call, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    """Prompts go bad where they have a character whose embedding is NaN; nothing is written."""
    monkeypatch.setattr("models.checkpoints.loading.require_finite", lambda *given: None)
    broken, output = shutil.copytree(checkpoint, tmp_path / "checkpoint"), tmp_path / "results.jsonl"
    config, weights = read_checkpoint(broken)
    weights["tok_embeddings.weight"][load_tokenizer(broken).encode("1", add_bos=False)] = math.nan
    (broken / "manifest.json").unlink()
    save_checkpoint(broken / "model.pth", config, weights)
    message = call(SELFSPEC, f"{SIZES} {DRAFT} --model {broken} --output {output}").refusal
    assert "baseline" in message and not output.exists()
    assert "row 1: " in message and "position 1" in message
