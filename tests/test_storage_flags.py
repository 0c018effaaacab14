"""How weights and caches are stored, from the command line: a draft's storage changes no token of the target."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import has_cpp_compiler
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--load_format dummy --dtype float64 --B 2 --num_prompts 3 --prefix_len 40 --gen_len 10 --device cpu"
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    architectures=["LlamaForCausalLM"],
)
DRAFT = "--gamma 3 --streamingllm_budget 24"
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 weights need VNNI")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs a script on random weights of CONFIG's shape; its record."""
    CONFIG.save_pretrained(tmp_path)

    def run(script: str, flags: str) -> dict[str, Any]:
        path = ROOT / "tests" / f"{script}_benchmark.py"
        models = ["--target", str(tmp_path)] if script == "longspec" else []
        arguments = [*models, "--model", str(tmp_path), *COMMON.split(), *flags.split()]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        runpy.run_path(str(path), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@needs_vnni
def test_a_quantised_draft_leaves_the_output_alone(run):
    plain = run("selfspec", DRAFT)
    assert plain["draft_weights"] is None and plain["draft_kv_dtype"] == "float64"
    for flags, weights, kv_dtype in (
        ("--draft_weights int8", "int8", "float64"),
        ("--draft_weights int4 --draft_kv_dtype int8 --draft_dtype bfloat16", "int4", "int8"),
        ("--draft_weights int8 --draft_kv_dtype fp8 --draft_policy full --streamingllm_budget -1", "int8", "fp8"),
    ):
        record = run("selfspec", f"--gamma 3 --streamingllm_budget 24 {flags}")
        assert record["tokens_sha256"] == plain["tokens_sha256"], flags
        assert record["identical_sequences"] == record["sequences"] == 3
        assert record["quantize"] is None and record["draft_weights"] == weights
        assert record["draft_kv_dtype"] == {"fp8": "float8_e4m3fn"}.get(kv_dtype, kv_dtype)


@needs_vnni
@pytest.mark.parametrize("flags", ["--quantize int8 --kv_dtype int8", "--quantize int4", "--kv_dtype fp8"])
def test_a_quantised_target_is_a_target_of_its_own(run, flags):
    """Speculation still emits what plain decoding of that target emits; `same` drafts with its very weights."""
    plain, quantised = run("baseline", ""), run("selfspec", f"{DRAFT} {flags}")
    assert quantised["identical_sequences"] == 3
    # Ten tokens of a small model need not notice 8-bit entries alone.
    assert quantised["tokens_sha256"] != plain["tokens_sha256"] or "--quantize" not in flags
    assert (quantised["kv_dtype"] == plain["kv_dtype"]) == ("--kv_dtype" not in flags)
    assert quantised["draft_weights"] == quantised["quantize"]


@needs_vnni
def test_a_standalone_draft_has_weights_of_its_own(run):
    record = run("longspec", f"{DRAFT} --quantize int4 --draft_weights int8")
    assert (record["quantize"], record["draft_weights"], record["identical_sequences"]) == ("int4", "int8", 3)
    record = run("longspec", f"{DRAFT} --quantize int8")
    assert (record["quantize"], record["draft_weights"]) == ("int8", None)


def test_compile_is_recorded_and_changes_no_token(run):
    if not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    eager, compiled = run("selfspec", DRAFT), run("selfspec", f"{DRAFT} --compile")
    assert (eager["compile"], compiled["compile"]) == (False, True)
    assert compiled["tokens_sha256"] == eager["tokens_sha256"]
    torch._dynamo.reset()
