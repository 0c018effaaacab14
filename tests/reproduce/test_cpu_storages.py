"""cpu_storages.py: a record for every storage of weights and entries, beside llama.cpp."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.machine import needs_vnni
from tests.support.programs import run

SCRIPT = "reproduce/cpu_storages.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 12 --turns 2 --draft_budget 16 --gamma 2"


class FakeRows:
    """Stands in for llama.cpp: a step takes as many ms as a row has tokens in it."""

    def __init__(self, gguf: str, prompt: list[int], rows: int, room: int, threads: int, entries: str) -> None:
        assert len(prompt) == 60 and rows == 2 and gguf.endswith("tiny.Q4_1.gguf") and entries in ("f16", "q8_0")

    def steps(self, n_token: int, n_steps: int) -> list[int]:
        return [n_token] * n_steps


@needs_vnni
def test_every_storage_has_a_row_of_both_samplings(
    checkpoint: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "tiny.Q4_1.gguf").touch()
    monkeypatch.setitem(sys.modules, "reproduce.helpers.llama_cpp_steps", SimpleNamespace(LlamaRows=FakeRows))
    paths = f"--model {model} --dataset {books} --llama_cpp --output {tmp_path / 'records.jsonl'}"
    ended = run(SCRIPT, f"{paths} {SIZES}".split())
    assert ended.code == 0, ended.err
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    records = {record["storage"]: record for record in map(json.loads, lines)}
    *ours, f16, q8_0 = records.values()
    stored = [(record["dtype"], record["quantize"], record["kv_dtype"], record["draft_weights"]) for record in ours]
    assert stored == [
        ("float32", None, "float32", "int8"),
        ("bfloat16", None, "bfloat16", "int8"),
        ("bfloat16", None, "int8", "int8"),
        ("bfloat16", "int8", "int8", "int8"),
        ("bfloat16", "int4", "int8", "int4"),
    ]
    for record in ours:
        assert [row["sampling"] for row in record["rows"]] == ["greedy", "coupled, 0.6"]
        assert all(len(row["speedups"]) == 2 and row["wall_speedup"] > 0 for row in record["rows"])
    for record in (f16, q8_0):
        assert record["rows"] == [{"baseline_step_ms": 1, "baseline_tokens_per_second": 2000.0, "verify_step_ms": 3}]


def test_without_the_package_of_llama_cpp_nothing_is_prefilled(
    checkpoint: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "tiny.Q4_1.gguf").touch()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    ended = run(SCRIPT, f"--model {model} --dataset {books} --storages float32 {SIZES} --llama_cpp".split())
    assert "llama-cpp-python" in ended.refusal and "prefill" not in ended.err
