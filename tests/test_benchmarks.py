"""The benchmark scripts as a user runs them: the record on the last line of stdout, and what is refused."""

from __future__ import annotations

import ast
import errno
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from models.attention import AttentionSpec, Selection, TorchAttention, select_backend
from models.checkpoints.loading import read_checkpoint, save_checkpoint
from models.checkpoints.model_source import find_model

ROOT = Path(__file__).resolve().parents[1]
PREFIX_LEN, GEN_LEN, GAMMA = 60, 12, 3
SIZES = {"--B": 2, "--prefix_len": PREFIX_LEN, "--gen_len": GEN_LEN}
DRAFT = {"--gamma": GAMMA, "--streamingllm_budget": 16, "--n_sink": 4}

SETTINGS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("benchmark", "model", "verification", "device", "dtype", "attention", "torch_version"), str),
    **dict.fromkeys(("B", "prefix_len", "gen_len", "gamma", "tensor_parallel", "tokens_generated", "sequences"), int),
    **dict.fromkeys(("temperature", "prefill_seconds"), float),
    "compile": bool,
    "peak_memory_bytes": int,
}
DRAFT_SETTINGS = {"draft": str, "draft_policy": str, "draft_budget": int}
OF_ACCEPTANCE = {"acceptance_rate": float, "acceptance_per_position": list, "mean_accepted_length": float}
OF_SPEEDUP = {"speedup": float, "wall_speedup": float}
OF_BASELINE = {"baseline_tokens_per_second": float, "baseline_step_ms": float}
OF_PHASES = {"draft_step_ms": float, "verify_step_ms": float, "other_ms_per_round": float}
OF_REAL_WEIGHTS = {"decode_tokens_per_second": float, "distinct_4gram_fraction": float}
NULLABLE = (
    DRAFT_SETTINGS
    | OF_ACCEPTANCE
    | OF_SPEEDUP
    | OF_BASELINE
    | OF_PHASES
    | OF_REAL_WEIGHTS
    | {"identical_sequences": int, "seed": int, "git_commit": str}
)


def flat(arguments: dict[str, object]) -> list[str]:
    return [str(word) for pair in arguments.items() for word in pair]


@dataclass(frozen=True)
class Run:
    """What a script printed: its lines before the last, and the record on the last."""

    lines: list[str]
    record: dict[str, Any]


def run_script(name: str, arguments: list[str], cwd: Path, launcher: tuple[str, ...] = ()) -> Run:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "tests" / f"{name}_benchmark.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return Run(lines, json.loads(last))


def check_record(record: dict[str, Any], *, benchmark: str, n_prompts: int, gamma: int, nulls: set[str]) -> None:
    """Every agreed key is there and of its type, exactly `nulls` are null, and the figures fit together."""
    for key, kind in SETTINGS.items():
        assert isinstance(record[key], kind), key
    assert {key for key in NULLABLE if record[key] is None} - {"git_commit"} == nulls
    for key, kind in NULLABLE.items():
        assert record[key] is None or isinstance(record[key], kind), key
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in record.values())

    asked = {"benchmark": benchmark, "gamma": gamma, "sequences": n_prompts, "verification": "greedy"}
    asked |= {"B": 2, "prefix_len": PREFIX_LEN, "gen_len": GEN_LEN, "device": "cpu", "temperature": 0.0}
    asked |= {"torch_version": torch.__version__, "compile": False, "tensor_parallel": 1}
    assert {key: record[key] for key in asked} == asked
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["git_commit"] or "0" * 40)
    assert n_prompts <= record["tokens_generated"] <= n_prompts * GEN_LEN
    if record["acceptance_rate"] is not None:
        assert 0 <= record["acceptance_rate"] <= 1
        assert 0 <= record["accepted"] <= record["drafted"]
        assert len(record["acceptance_per_position"]) == gamma
        assert all(share is None or 0 <= share <= 1 for share in record["acceptance_per_position"])
    if record["mean_accepted_length"] is not None:
        assert 1 <= record["mean_accepted_length"] <= gamma + 1
    if record["speedup"] is not None:
        ratio = record["decode_tokens_per_second"] / record["baseline_tokens_per_second"]
        assert record["speedup"] == pytest.approx(ratio, rel=1e-3, abs=1e-4)


def test_selfspec_with_everything_measured(checkpoint: Path, books: Path, tmp_path: Path) -> None:
    """More prompts than slots, phase times, printed rows, a results file that already has a line."""
    results = tmp_path / "results.jsonl"
    results.write_text('{"an": "earlier record"}\n')
    saved = tmp_path / "rows.jsonl"
    paths = {"--model": checkpoint / "model.pth", "--dataset": books, "--output": results, "--save_rows": saved}
    flags = ["--num_prompts", "5", "--dtype", "float64", "--benchmark", "--printoutput"]
    run = run_script("selfspec", flat(paths | SIZES | DRAFT) + flags, tmp_path)
    check_record(run.record, benchmark="selfspec", n_prompts=5, gamma=GAMMA, nulls={"seed"})
    asked = {"model": checkpoint.name, "draft": "self", "draft_policy": "streaming", "draft_budget": 16, "n_sink": 4}
    asked |= {"dtype": "float64", "dataset": str(books), "load_format": "pth"}
    assert {key: run.record[key] for key in asked} == asked
    assert run.record["tokens_generated"] == 5 * GEN_LEN
    assert run.record["identical_sequences"] == 5
    assert 0 < run.record["accepted"] < run.record["drafted"], "some drafts are meant to be right, some wrong"
    rows = [line for line in run.lines if line.startswith("row ")]
    assert [line.partition(":")[0] for line in rows] == [f"row {row}" for row in range(5)]
    prompts = [line for line in run.lines if line.startswith("prompt ")]
    assert [line.partition(":")[0] for line in prompts] == [f"prompt {row} ends" for row in range(5)]
    text = "".join(book.read_text() for book in sorted(books.iterdir()))
    ends = [ast.literal_eval(line.partition(": ")[2]) for line in prompts]
    assert all(20 < len(end) < PREFIX_LEN and end in text for end in ends), "a token is a byte"
    assert_same_texts(rows, saved)
    (headline,) = (line for line in run.lines if "prefill" in line)
    assert "; greedy; " in headline
    phases = {line[:30].strip(): line.split()[-1] for line in run.lines if line.startswith("  ms ")}
    assert phases == {
        "ms per step / round": f"{run.record['round_ms']:.1f}",
        "ms per draft step": f"{run.record['draft_step_ms']:.1f}",
        "ms per verification": f"{run.record['verify_step_ms']:.1f}",
        "ms of a round's rest": f"{run.record['other_ms_per_round']:.1f}",
    }
    assert list(run.record["contention"]) == ["baseline", "speculation", "phase times"]
    assert all(seen["cpu_share"] > 0 for seen in run.record["contention"].values())
    earlier, appended = results.read_text().splitlines()
    assert earlier == '{"an": "earlier record"}'
    assert json.loads(appended) == run.record


def assert_same_texts(printed: list[str], saved: Path) -> None:
    """Of every pass, the rows that were saved have the texts that were printed."""
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [*rows[0]] == ["run", "pass", "row", "finish_reason", "tokens", "text"]
    texts = {f"row {number}": ast.literal_eval(text) for number, text in (line[4:].split(": ", 1) for line in printed)}
    for name in ("baseline", "speculation", "phase times"):
        assert {f"row {row['row']}": row["text"] for row in rows if row["pass"] == name} == texts


def test_selfspec_without_baseline_over_a_full_draft_cache(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"--model": checkpoint, "--dataset": books / "book1.txt", "--model_name": "org/a-name"}
    flags = ["--no_baseline", "--draft_policy", "full", "--dtype", "float64"]
    record = run_here("selfspec", flat(paths | SIZES | {"--gamma": GAMMA}) + flags, monkeypatch, capsys)
    nulls = {"seed", "identical_sequences", *OF_BASELINE, *OF_SPEEDUP, *OF_PHASES}
    check_record(record, benchmark="selfspec", n_prompts=2, gamma=GAMMA, nulls=nulls)
    assert record["model"] == "org/a-name"
    assert record["acceptance_rate"] == 1.0
    assert record["acceptance_per_position"] == [1.0] * GAMMA
    assert record["draft_budget"] == PREFIX_LEN + GEN_LEN + GAMMA + 1
    assert record["tokens_generated"] == 2 * GEN_LEN


def test_selfspec_with_gamma_zero(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"--model": checkpoint, "--dataset": books}
    flags = ["--gamma", "0", "--benchmark", "--dtype", "float64"]
    record = run_here("selfspec", flat(paths | SIZES | DRAFT) + flags, monkeypatch, capsys)
    check_record(record, benchmark="selfspec", n_prompts=2, gamma=0, nulls={"seed", "acceptance_rate", "draft_step_ms"})
    assert record["mean_accepted_length"] == 1.0
    assert record["acceptance_per_position"] == []
    assert record["drafted"] == 0
    assert record["identical_sequences"] == 2


def test_selfspec_on_random_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The costs are real, what depends on the text is null. No weights, tokenizer or data set are read."""
    (tmp_path / "only").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "only")
    paths = {"--model": "only/model.pth", "--load_format": "dummy", "--save_rows": "rows.jsonl"}
    monkeypatch.chdir(tmp_path)
    flags = ["--benchmark", "--printoutput"]
    run = printed_here("selfspec", flat(paths | SIZES | DRAFT) + flags, monkeypatch, capsys)
    nulls = {"seed", *OF_ACCEPTANCE, *OF_SPEEDUP, *OF_REAL_WEIGHTS}
    check_record(run.record, benchmark="selfspec", n_prompts=2, gamma=GAMMA, nulls=nulls)
    assert run.record["load_format"] == "dummy"
    assert run.record["dtype"] == "float32"
    assert all(json.loads(line)["text"] is None for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    (shown,) = (line for line in run.lines if line.startswith("prompt 1 ends: "))
    assert len(ast.literal_eval(shown.partition(": ")[2])) == 32, "token ids, since random weights have no text"


def test_selfspec_stops_rows_at_their_end(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"--model": checkpoint, "--dataset": books}
    flags = ["--num_prompts", "6", "--stop_at_eos", "--dtype", "float64"]
    record = run_here("selfspec", flat(paths | SIZES | DRAFT) + flags, monkeypatch, capsys)
    check_record(record, benchmark="selfspec", n_prompts=6, gamma=GAMMA, nulls={"seed", *OF_PHASES})
    assert record["identical_sequences"] == 6
    assert 6 < record["tokens_generated"] < 6 * GEN_LEN


def printed_here(
    script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a script in this process; what it printed."""
    path = ROOT / "tests" / f"{script}_benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")
    *lines, last = capsys.readouterr().out.splitlines()
    return Run(lines, json.loads(last))


def run_here(*arguments: Any) -> dict[str, Any]:
    """Run a script in this process; its record."""
    return printed_here(*arguments).record


def test_coupled_samples_are_the_same_from_every_command(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain decoding, two kinds of self-speculation, n-grams and an oracle: one digest; another seed, another."""
    sampling = "--temperature 1.5 --top_k 40 --seed 7 --verification coupled --dtype float64 --num_prompts 5"
    common = flat({"--model": checkpoint, "--dataset": books} | SIZES) + sampling.split()
    printed = printed_here("baseline", common, monkeypatch, capsys)
    assert any("; coupled at temperature 1.5, top_k 40, seed 7; " in line for line in printed.lines)
    plain = printed.record
    assert (plain["verification"], plain["seed"], plain["top_k"], plain["draft"]) == ("coupled", 7, 40, None)
    assert plain["distinct_4gram_fraction"] > 0.9, "samples are meant to vary"
    accepted = {}
    for draft in ("self --gamma 3 --streamingllm_budget 16", "self --gamma 1", "ngram", "oracle --gamma 5"):
        record = run_here("selfspec", [*common, "--draft", *draft.split()], monkeypatch, capsys)
        assert record["tokens_sha256"] == plain["tokens_sha256"], draft
        assert record["identical_sequences"] == record["sequences"] == 5
        assert record["draft"] == draft.split()[0] and record["temperature"] == 1.5
        accepted[draft] = record["acceptance_rate"]
    assert accepted["oracle --gamma 5"] == 1.0 > accepted["self --gamma 3 --streamingllm_budget 16"] > 0
    other = run_here("baseline", [*common, "--seed", "8"], monkeypatch, capsys)
    assert other["tokens_sha256"] != plain["tokens_sha256"]


def test_rejection_is_reported_without_comparing_rows(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are other samples of the same law: a count of identical ones would mean nothing."""
    common = flat({"--model": checkpoint, "--dataset": books, "--temperature": 1.0} | SIZES)
    for draft in ("self", "ngram"):
        record = run_here("selfspec", [*common, "--draft", draft], monkeypatch, capsys)
        assert record["verification"] == "rejection" and record["identical_sequences"] is None
        assert record["baseline_tokens_per_second"] and record["speedup"]
        assert (record["acceptance_rate"] is None) == (record["drafted"] == 0)
        assert record["drafted"] or draft == "ngram", "only an n-gram may find nothing to draft"


def test_baseline_under_torchrun(checkpoint: Path, books: Path, tmp_path: Path) -> None:
    paths = {"--model": checkpoint / "model.pth", "--dataset": books, "--output": "results.jsonl"}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    run = run_script("baseline", [*flat(paths | SIZES), "--num_prompts", "3", "--printoutput"], tmp_path, launcher)
    nulls = {"seed", "identical_sequences", *DRAFT_SETTINGS, *OF_ACCEPTANCE, *OF_SPEEDUP, *OF_PHASES}
    check_record(run.record, benchmark="baseline", n_prompts=3, gamma=0, nulls=nulls)
    assert run.record["tokens_generated"] == 3 * GEN_LEN
    assert run.record["decode_tokens_per_second"] == run.record["baseline_tokens_per_second"]
    assert len([line for line in run.lines if line.startswith("row ")]) == 3
    assert json.loads((tmp_path / "results.jsonl").read_text()) == run.record


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def edit_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    (folder / "manifest.json").unlink()


def renumber_token(folder: Path, character: str, index: int) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"][character] = index
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "manifest.json").unlink()


def break_token(folder: Path, character: str) -> None:
    """NaN in the embedding of one character: the prompts that have it go bad where they have it."""
    config, state_dict = read_checkpoint(folder)
    state_dict = {name: tensor.clone() for name, tensor in state_dict.items()}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    state_dict["tok_embeddings.weight"][vocabulary[character]] = math.nan
    (folder / "manifest.json").unlink()
    save_checkpoint(folder / "model.pth", config, state_dict)


@dataclass(frozen=True)
class Bad:
    """Arguments on top of good ones, damage to a copy of the checkpoint, what the message has to say."""

    arguments: str
    says: tuple[str, ...]
    damage: Callable[[Path], object] | None = None
    environment: tuple[tuple[str, str], ...] = ()


BAD_INPUT = {
    "longer than the context": Bad("--prefix_len 250", ("250 + 12 + 3 + 1 = 266", "<= 256", "--prefix_len 240")),
    "new tokens alone are longer": Bad("--gen_len 300", ("<= 256", "shorter --gen_len: there is room for 252 prompt")),
    "longer than the text": Bad(
        "--prefix_len 230",
        ("3 books, 600 tokens", "0 distinct prompts of 230", "2 distinct prompts of 230", "to 201 tokens"),
    ),
    "too many prompts": Bad(
        "--num_prompts 10", ("9 distinct prompts of 60", "10 distinct prompts of 60", "to 51 tokens")
    ),
    "budget without a window": Bad("--streamingllm_budget 4", ("--draft_budget", "budget 4, n_sink 4", "to 5")),
    "negative budget": Bad("--streamingllm_budget -300", ("budget -300",)),
    "negative sinks": Bad("--n_sink -1", ("--n_sink", "n_sink -1")),
    "window shorter than a block": Bad("--streamingllm_budget 7", ("gamma 3, window 3", "budget by 1")),
    "negative gamma": Bad("--gamma -1", ("--gamma", "-1", ">= 0")),
    "very negative gamma": Bad("--gamma -500", ("--gamma", "-500", ">= 0")),
    "no rows": Bad("--B 0", ("--B", "seen:     0", ">= 1")),
    "no new tokens": Bad("--gen_len 0", ("--gen_len", "seen:     0", ">= 1")),
    "no prompt": Bad("--prefix_len 0", ("--prefix_len", "seen:     0", ">= 1")),
    "a prompt without text": Bad("--prefix_len 1", ("prefix_len", "seen:     1", ">= 2")),
    "fewer prompts than slots": Bad("--num_prompts 1", ("--num_prompts", "seen:     1", ">= 2")),
    "too many rows for the memory": Bad(
        "--B 100000000",
        ("weights", "target KV", "draft KV", "logits", "activations", "GiB for a batch of 100000000", "largest batch"),
    ),
    "too large a budget for the memory": Bad("--streamingllm_budget 1000000000000", ("draft KV", "--draft_budget")),
    "negative temperature": Bad("--temperature -1", ("--temperature", "seen:     -1.0")),
    "temperature that is no number": Bad("--temperature nan", ("--temperature", "nan")),
    "negative top_k": Bad("--temperature 1 --top_k -2", ("--top_k", "seen:     -2")),
    "top_p of nothing": Bad("--temperature 1 --top_p 0", ("--top_p", "0 < top_p <= 1")),
    "negative seed": Bad("--temperature 1 --seed -3", ("--seed", "seen:     -3")),
    "filter without a temperature": Bad("--top_p 0.9", ("top_p 0.9 at temperature 0", "--temperature")),
    "greedy at a temperature": Bad("--temperature 1 --verification greedy", ("--verification", "temperature 1.0")),
    "n-gram with a KV budget": Bad(
        "--draft ngram", ("leave out --draft_budget and", "16, 4 with draft ngram", "--max_ngram")
    ),
    "full cache with a budget": Bad("--draft_policy full", ("leave out --draft_budget", "draft self, full")),
    "self-speculation with n-grams": Bad("--max_ngram 3", ("--max_ngram", "3 with draft self, streaming")),
    "unknown device": Bad("--device tpu", ("--device", "tpu", "--device auto")),
    "no such data set": Bad("--dataset nowhere.txt", ("nowhere.txt", "no such file")),
    "results in a missing folder": Bad("--output missing/results.jsonl", ("--output", "missing/results.jsonl")),
    "results in a device": Bad("--save_rows /dev/full", ("--save_rows", "/dev/full", "a pipe or a device")),
    "results in a checkpoint": Bad("--output ../checkpoint/model.pth", ("--output", "lines of JSON")),
    "results in a folder's place": Bad("--output .", ("--output", "seen:     .")),
    "no such preset": Bad("--load_format dummy --model_name org/unknown", ("org/unknown", "meta-llama/Llama-2-7b-hf")),
    "ranks that do not run": Bad("--rank_group 0 1", ("--rank_group", "seen:     0 1", "--nproc_per_node=2")),
    "prompts without number": Bad(
        "--num_prompts 1000000000000", ("--num_prompts", "1000000000000 x 60", "fewer prompts")
    ),
    "rows among records": Bad("--output same.jsonl --save_rows ./same.jsonl", ("--save_rows", "two files")),
    "a model of a long name": Bad("--model " + "x" * 300, ("--model", "no such checkpoint")),
    "a text of a long name": Bad("--dataset " + "x" * 5000, ("dataset", "no such file")),
    "a text without a name": Bad("--dataset=", ("dataset", "no such file")),
    "no time for a rank": Bad("--rank_timeout 0.001", ("--rank_timeout", "seen:     0.001", "1 to 1000000 seconds")),
    "a time that is no number": Bad("--rank_timeout nan", ("--rank_timeout", "seen:     nan")),
    "more ranks than KV heads": Bad("", ("2 KV heads, 3 ranks", "1 to 2 ranks"), None, (("WORLD_SIZE", "3"),)),
    "no model.pth": Bad("", ("model.pth", "no such file"), lambda d: (d / "model.pth").unlink()),
    "no folder": Bad("", ("there is no such checkpoint", "convert_hf_checkpoint.py"), shutil.rmtree),
    "no file, in a folder of other things": Bad("--model nothing.pth", ("there is no such checkpoint", "nothing.pth")),
    "a download": Bad(
        "--model ../checkpoint/smol.Q4.GGUF",
        ("no converted checkpoint", "convert_hf_checkpoint.py --checkpoint_dir ../checkpoint, then use --model ../ch"),
        lambda d: (d / "smol.Q4.GGUF").touch(),
    ),
    "no config": Bad("", ("config.json", "no such file"), lambda d: (d / "config.json").unlink()),
    "no tokenizer": Bad("", ("the tokenizer is missing",), lambda d: (d / "tokenizer.json").unlink()),
    "another model's tokenizer": Bad(
        "", ("tokenizer.json", "token id 257", "0 <= id < 257"), lambda d: renumber_token(d, "1", 257)
    ),
    "another architecture": Bad(
        "", ("GemmaForCausalLM", "LlamaForCausalLM"), lambda d: edit_config(d, architectures=["GemmaForCausalLM"])
    ),
    "heads that do not fit": Bad("", ("n_head 4, n_kv_head 3",), lambda d: edit_config(d, num_key_value_heads=3)),
    "model.pth cut": Bad("", ("model.pth", "manifest"), lambda d: truncate(d / "model.pth")),
    "model.pth cut, no manifest": Bad(
        "", ("model.pth", "cannot be read"), lambda d: (truncate(d / "model.pth"), (d / "manifest.json").unlink())
    ),
    "model.pth of another config": Bad(
        "", ("another config", "ffn_dim 96", "ffn_dim 100"), lambda d: edit_config(d, intermediate_size=100)
    ),
    "NaN in one prompt": Bad("", ("baseline", "row 1: logits at position 1 are NaN"), lambda d: break_token(d, "1")),
    "NaN in every prompt": Bad(
        "", ("row 0: logits at position 0", "row 1: logits at position 0"), lambda d: break_token(d, "<s>")
    ),
}


OTHER_DRAFTS = {
    "n-gram of nothing": Bad("--draft ngram --max_ngram 0", ("--max_ngram", "seen:     0")),
    "oracle without a baseline": Bad("--draft oracle --no_baseline", ("--draft oracle", "--no_baseline")),
    "oracle that knows the samples": Bad(
        "--draft oracle --temperature 1", ("--draft oracle", "rejection at temperature 1.0", "--verification coupled")
    ),
}


def names_the_alias_alone(text: str) -> bool:
    return "--streamingllm_budget" in text and "--draft_budget" not in text


def test_no_message_names_the_draft_budget_by_its_alias_alone() -> None:
    """Of the sources' strings only the flag's definition; `refusal` looks at what is put together when it is said."""
    sources = [path for folder in ("engine", "kv_cache", "models") for path in (ROOT / folder).rglob("*.py")]
    strings = [
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in strings if names_the_alias_alone(text)] == ["--streamingllm_budget"]


def refusal(
    script: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run a script in this process; its stderr, after it ended with code 2 and one message."""
    path = ROOT / "tests" / f"{script}_benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(path), run_name="__main__")
    assert ending.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(re.findall(r"^error: \S", printed.err, re.MULTILINE)) == 1
    assert "Traceback" not in printed.err
    message = printed.err[printed.err.index("error: ") :]
    assert not names_the_alias_alone(message)
    return message


def test_a_full_disk_loses_nothing_of_a_run(
    checkpoint: Path,
    books: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows and record are printed, the record last; one warning while it runs, and one error at its end."""

    def full_disk(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    paths = {"--model": checkpoint, "--dataset": books, "--save_rows": tmp_path / "r", "--output": tmp_path / "o"}
    with pytest.raises(SystemExit) as ending:
        run_here("baseline", flat(paths | SIZES), monkeypatch, capsys)
    assert ending.value.code == 2
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [json.loads(line)["row"] for line in lines if line.startswith('{"run"')] == [0, 1]
    assert json.loads(lines[-1])["benchmark"] == "baseline"
    assert len(re.findall("^warning: a record could not be appended", printed.err, re.MULTILINE)) == 1
    assert len(re.findall("^error: a record could not be appended", printed.err, re.MULTILINE)) == 1


@pytest.mark.parametrize("what", OTHER_DRAFTS)
def test_bad_input_to_other_drafts_is_refused(
    what: str, checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = OTHER_DRAFTS[what]
    arguments = flat({"--model": checkpoint, "--dataset": books} | SIZES) + bad.arguments.split()
    message = refusal("selfspec", arguments, monkeypatch, capsys)
    for part in (*bad.says, "where:", "seen:", "required:", "fix:"):
        assert part in message


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_refused(
    what: str,
    checkpoint: Path,
    books: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = BAD_INPUT[what]
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    if bad.damage:
        bad.damage(folder)
    for name, value in bad.environment:
        monkeypatch.setenv(name, value)
    if what.startswith("NaN in"):  # stands for a model that makes NaN of finite weights
        monkeypatch.setattr("models.checkpoints.loading.is_finite", lambda tensor: True)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    paths = {"--model": folder / "model.pth", "--dataset": books, "--output": "results.jsonl"}
    message = refusal("selfspec", flat(paths | SIZES | DRAFT) + bad.arguments.split(), monkeypatch, capsys)
    for part in (*bad.says, "where:", "seen:", "required:", "fix:"):
        assert part in message
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("what", ["no model.pth", "model.pth cut", "model.pth cut, no manifest"])
def test_a_missing_draft_is_found_before_the_text_is_read(
    what: str,
    checkpoint: Path,
    books: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(checkpoint, folder)
    BAD_INPUT[what].damage(folder)
    monkeypatch.setattr("engine.bench.setup.make_prompts", None)
    paths = {"--target": checkpoint, "--model": folder / "model.pth", "--dataset": books}
    message = refusal("longspec", flat(paths | SIZES | DRAFT), monkeypatch, capsys)
    assert str(folder / "model.pth") in message


def test_random_weights_are_found_by_the_names_of_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither folder is there, and --model_name names the target alone."""
    monkeypatch.chdir(tmp_path)
    draft = find_model("checkpoints/TinyLlama/TinyLlama_v1.1/model.pth", "dummy", None, "--model")
    named = find_model("anything/model.pth", "dummy", "togethercomputer/LLaMA-2-7B-32K", "--target")
    found = find_model("checkpoints/togethercomputer/LLaMA-2-7B-32K/model.pth", "dummy", None, "--target")
    assert (draft.name, draft.config.n_layer) == ("TinyLlama/TinyLlama_v1.1", 22)
    assert (named.name, named.config) == (found.name, found.config)
    assert find_model("TinyLlama_v1.1", "dummy", None, "--model").config == draft.config


def test_the_batch_that_the_refusal_names_fits(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 10 MB free; the next larger batch is refused again."""
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: 10_000_000)
    arguments = flat({"--model": checkpoint, "--dataset": books} | SIZES | DRAFT)
    message = refusal("selfspec", [*arguments, "--B", "5000"], monkeypatch, capsys)
    largest = int(re.findall(r"use --B (\d+), the largest batch that fits", message)[0])
    assert f"use --B {largest}," in refusal("selfspec", [*arguments, "--B", str(largest + 1)], monkeypatch, capsys)
    message = refusal("selfspec", [*arguments, "--B", str(largest)], monkeypatch, capsys)
    assert "too little text" in message, "memory is checked before the text is read"


def select_reader(name: str, device: str, spec: AttentionSpec, entries: torch.dtype | None = None) -> Selection:
    """A backend that reads int8 in a model that computes in bfloat16, and dequantises all else."""
    backend = TorchAttention()
    reads = entries == torch.int8 and spec.dtype == torch.bfloat16
    backend.dequantizes = lambda n_token: not reads  # type: ignore[method-assign]
    return Selection(backend, "patched")


@pytest.mark.parametrize(
    "flags,select,of_all_rows",
    [
        ("--kv_dtype fp8", select_backend, True),
        ("--kv_dtype int8", select_backend, True),
        ("--kv_dtype same", select_backend, False),
        ("--draft_policy full --draft_kv_dtype fp8", select_backend, True),
        ("--kv_dtype int8", select_reader, False),
        ("--kv_dtype int8 --draft_kv_dtype fp8", select_reader, True),
        ("--kv_dtype fp8 --draft_kv_dtype int8", select_reader, True),
        ("--kv_dtype int8 --draft_dtype float32", select_reader, True),
        ("--draft_kv_dtype int8 --draft_positions absolute --target", select_reader, False),
        ("--draft_kv_dtype int8 --draft_positions cache --target", select_reader, True),
    ],
)
def test_entries_that_attention_cannot_read_take_memory(
    checkpoint: Path,
    books: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    select: Callable[..., Selection],
    of_all_rows: bool,
) -> None:
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: 10_000_000)
    monkeypatch.setattr("engine.bench.plan.select_backend", select)
    policy = {} if "full" in flags else {"--streamingllm_budget": 16, "--n_sink": 4}
    arguments = {"--model": checkpoint, "--dataset": books, "--attention": "torch", "--dtype": "bfloat16"}
    arguments |= SIZES | {"--B": 5000, "--gamma": GAMMA} | policy
    name, given = ("longspec", f"{flags} {checkpoint}") if flags.endswith("--target") else ("selfspec", flags)
    message = refusal(name, [*flat(arguments), *given.split()], monkeypatch, capsys)
    assert "weights" in message
    assert ("dequantised KV" in message) == of_all_rows


def test_the_default_model_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("models.checkpoints.model_source.DEFAULT_CHECKPOINT", tmp_path / "default")
    message = refusal("baseline", ["--model", str(tmp_path / "default" / "model.pth")], monkeypatch, capsys)
    assert "make demo" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_on_a_machine_without_it(
    checkpoint: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flat({"--model": checkpoint, "--dataset": books, "--device": "cuda"} | SIZES)
    assert "sees no CUDA device" in refusal("baseline", arguments, monkeypatch, capsys)
