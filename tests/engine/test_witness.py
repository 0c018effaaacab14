"""Speculation equals a plain reference, token for token, over random scenarios: a KV witness and float64 Llamas."""

import os

import pytest

from kv_cache.entries import LARGEST
from tests.support.scenarios import REFERENCED, SHAPES, LlamaWorld, WitnessWorld, run_scenario, run_scenarios

SCENARIOS = int(os.environ.get("WITNESS_SCENARIOS", "120"))
LLAMA_SCENARIOS = int(os.environ.get("LLAMA_SCENARIOS", "24"))
BATCHES = 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_speculation_equals_the_reference(batch: int, record_property) -> None:
    run_scenarios(WitnessWorld(), range(batch, SCENARIOS, BATCHES), "witness", record_property)


@pytest.mark.parametrize("drafter", REFERENCED)
def test_rejection_draws_what_the_reference_draws(drafter: str) -> None:
    for seed in range(8):
        run_scenario(WitnessWorld(), seed, drafter)


@pytest.mark.parametrize("shape", SHAPES)
def test_speculation_equals_recomputation(shape: str, record_property) -> None:
    seeds = range(list(SHAPES).index(shape), LLAMA_SCENARIOS, len(SHAPES))
    run_scenarios(LlamaWorld(shape), seeds, "float64 Llama", record_property)


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize("shape", ["three queries a group, tied", "sliding window"])
def test_speculation_equals_recomputation_with_entries_of_8_bits(shape, kv_dtype, record_property) -> None:
    """The target's entries have 8 bits: speculation emits what plain decoding emits with them."""
    name = f"float64 Llama, {str(kv_dtype).removeprefix('torch.')} KV,"
    run_scenarios(LlamaWorld(shape, kv_dtype), range(-(-LLAMA_SCENARIOS // 10)), name, record_property)
