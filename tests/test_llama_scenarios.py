"""Speculative decoding == recomputing everything anew, token for token, on float64 Llamas of several shapes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from scenarios import run_scenarios
from tiny import TINY, continue_by_recomputing, tiny_model

SCENARIOS = int(os.environ.get("LLAMA_SCENARIOS", "60"))
SHAPES = {
    "grouped heads": TINY,
    "one KV head": replace(TINY, n_kv_head=1),
    "three queries a group, tied": replace(TINY, n_head=6, n_kv_head=2, tie_embeddings=True),
    "sliding window": replace(TINY, n_kv_head=4, sliding_window=9),
}


class LlamaWorld:
    drafters = ("snapkv", "standalone, snapkv")

    def __init__(self, shape: str) -> None:
        self.model = tiny_model(SHAPES[shape])

    def continue_plainly(self, prompt, n_tokens, sampling, request):
        return continue_by_recomputing(self.model, prompt, n_tokens, sampling, request)


@pytest.mark.parametrize("shape", SHAPES)
def test_speculation_equals_recomputation(shape: str, record_property) -> None:
    seeds = range(list(SHAPES).index(shape), SCENARIOS, len(SHAPES))
    run_scenarios(LlamaWorld(shape), seeds, "float64 Llama", record_property)
