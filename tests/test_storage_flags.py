"""How weights and caches are stored, from the command line: a draft's storage changes no token of the target."""

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
    """Runs a script on random weights of CONFIG's shape; its record."""
    CONFIG.save_pretrained(tmp_path)

    def run(script: str, flags: str) -> dict[str, Any]:
        models = ["--target", str(tmp_path)] if script == "longspec" else []
        return benchmark(script, [*models, "--model", str(tmp_path), *COMMON.split(), *flags.split()]).record

    return run


@needs_vnni
def test_a_quantised_draft_leaves_the_output_benchmark(run):
    plain = run("selfspec", DRAFT)
    assert plain["draft_weights"] is None and plain["draft_kv_dtype"] == "float64"
    for flags, weights, kv_dtype in (
        ("--draft_weights int8", "int8", "float64"),
        ("--draft_weights int4 --draft_kv_dtype int8 --draft_dtype bfloat16", "int4", "int8"),
        ("--draft_weights int8 --draft_kv_dtype fp8 --draft_policy full --streamingllm_budget -1", "int8", "fp8"),
    ):
        record = run("selfspec", f"{DRAFT} {flags}")
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


def test_compile_has_no_effect_on_a_cpu(run):
    assert run("baseline", "--compile")["compile"] is False
