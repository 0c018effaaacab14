"""Speculation equals recomputing everything, on float64 Llamas of several shapes."""

import os
from dataclasses import replace

import pytest
import torch

from kv_cache.entries import LARGEST
from tests.support.policies import SELF_DRAFT_POLICIES, WITHOUT_QUERIES
from tests.support.scenarios import HEAD_DRAFTS, run_scenarios
from tests.support.tiny import TINY, recomputing, tiny_model

SCENARIOS = int(os.environ.get("LLAMA_SCENARIOS", "60"))
QUERYING = tuple(name for name in SELF_DRAFT_POLICIES if name not in WITHOUT_QUERIES)
SHAPES = {
    "grouped heads": TINY,
    "one KV head": replace(TINY, n_kv_head=1),
    "three queries a group, tied": replace(TINY, n_head=6, n_kv_head=2, tie_embeddings=True),
    "sliding window": replace(TINY, n_kv_head=4, sliding_window=9),
}


class LlamaWorld:
    drafters = (*QUERYING, *(f"standalone, {name}" for name in QUERYING), "medusa", *HEAD_DRAFTS)

    def __init__(self, shape: str, kv_dtype: torch.dtype = torch.float64) -> None:
        self.model = tiny_model(SHAPES[shape])
        self.kv_dtype, self.next_logits = kv_dtype, recomputing(self.model, kv_dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_speculation_equals_recomputation(shape: str, record_property) -> None:
    seeds = range(list(SHAPES).index(shape), SCENARIOS, len(SHAPES))
    run_scenarios(LlamaWorld(shape), seeds, "float64 Llama", record_property)


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize("shape", ["three queries a group, tied", "sliding window"])
def test_speculation_equals_recomputation_with_entries_of_8_bits(shape, kv_dtype, record_property) -> None:
    """The target's entries have 8 bits: speculation emits what plain decoding emits with them."""
    name = f"float64 Llama, {str(kv_dtype).removeprefix('torch.')} KV,"
    run_scenarios(LlamaWorld(shape, kv_dtype), range(SCENARIOS // 10), name, record_property)
