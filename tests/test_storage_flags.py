"""Flags that quantise weights and caches of a target and its draft."""

from pathlib import Path
from typing import Any

import pytest
from hf_tiny import SHAPE
from machine import needs_vnni
from programs import benchmark
from transformers import LlamaConfig

COMMON = "--load_format dummy --dtype float64 --B 2 --num_prompts 3 --prefix_len 40 --gen_len 10 --device cpu"
CONFIG = LlamaConfig(
    **SHAPE | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256},
    architectures=["LlamaForCausalLM"],
)
DRAFT = "--gamma 3 --streamingllm_budget 24"


@pytest.fixture
def run(tmp_path: Path):
    """Function that runs a script on random weights of CONFIG's shape and returns its record."""
    CONFIG.save_pretrained(tmp_path)

    def run(script: str, flags: str) -> dict[str, Any]:
        models = ["--target", str(tmp_path)] if script == "longspec" else []
        return benchmark(script, [*models, "--model", str(tmp_path), *COMMON.split(), *flags.split()]).record

    return run


@needs_vnni
def test_a_quantised_draft_changes_no_token(run):
    plain = run("selfspec", DRAFT)
    assert plain["draft_weights"] is None and plain["draft_kv_dtype"] == "float64"
    for flags, weights, kv_dtype in (
        ("--draft_weights int4 --draft_kv_dtype int8 --draft_dtype bfloat16", "int4", "int8"),
        ("--draft_weights int8 --draft_kv_dtype fp8 --draft_policy full --streamingllm_budget -1", "int8", "fp8"),
    ):
        record = run("selfspec", f"{DRAFT} {flags}")
        assert record["tokens_sha256"] == plain["tokens_sha256"], flags
        assert record["identical_sequences"] == record["sequences"] == 3
        assert record["quantize"] is None and record["draft_weights"] == weights
        assert record["draft_kv_dtype"] == {"fp8": "float8_e4m3fn"}.get(kv_dtype, kv_dtype)


@needs_vnni
@pytest.mark.parametrize("flags", ["--quantize int8 --kv_dtype fp8", "--quantize int4"])
def test_speculation_with_a_quantised_target_emits_its_plain_text(run, flags):
    """The draft `same` has the target's quantised weights."""
    plain, quantised = run("baseline", ""), run("selfspec", f"{DRAFT} {flags}")
    assert quantised["identical_sequences"] == 3
    assert quantised["tokens_sha256"] != plain["tokens_sha256"]
    assert (quantised["kv_dtype"] == plain["kv_dtype"]) == ("--kv_dtype" not in flags)
    assert quantised["draft_weights"] == quantised["quantize"]


@needs_vnni
def test_a_standalone_draft_is_quantised_apart_from_the_target(run):
    record = run("longspec", f"{DRAFT} --quantize int4 --draft_weights int8")
    assert (record["quantize"], record["draft_weights"], record["identical_sequences"]) == ("int4", "int8", 3)
