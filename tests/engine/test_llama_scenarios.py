"""Speculation equals recomputing everything, on float64 Llamas of several shapes."""

import os

import pytest

from kv_cache.entries import LARGEST
from tests.support.scenarios import SHAPES, LlamaWorld, run_scenarios

SCENARIOS = int(os.environ.get("LLAMA_SCENARIOS", "24"))


@pytest.mark.parametrize("shape", SHAPES)
def test_speculation_equals_recomputation(shape: str, record_property) -> None:
    seeds = range(list(SHAPES).index(shape), SCENARIOS, len(SHAPES))
    run_scenarios(LlamaWorld(shape), seeds, "float64 Llama", record_property)


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize("shape", ["three queries a group, tied", "sliding window"])
def test_speculation_equals_recomputation_with_entries_of_8_bits(shape, kv_dtype, record_property) -> None:
    """The target's entries have 8 bits: speculation emits what plain decoding emits with them."""
    name = f"float64 Llama, {str(kv_dtype).removeprefix('torch.')} KV,"
    run_scenarios(LlamaWorld(shape, kv_dtype), range(-(-SCENARIOS // 10)), name, record_property)
