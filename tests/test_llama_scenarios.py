"""Speculation equals recomputing everything, on float64 Llamas of several shapes, and plain decoding in bfloat16."""

import os
from dataclasses import replace

import pytest
import torch
from policies import SELF_DRAFT_POLICIES, WITHOUT_QUERIES
from scenarios import HEAD_DRAFTS, run_scenarios
from tiny import TINY, recomputing, tiny_model

from engine import ModelRunner, SamplingParams, SelfSpeculation, generate
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.entries import LARGEST
from models import ModelConfig, linear_cpp, load_model
from models.attention import select_backend
from models.llama import attention_spec
from models.pointwise import use_pointwise
from models.pointwise_cpp import pointwise_beside

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


CONFIG = ModelConfig(
    vocab_size=512, n_layer=3, dim=192, n_head=3, n_kv_head=1, head_dim=64, ffn_dim=320, max_context=512
)
PROMPTS = [[7 * i % 512 for i in range(1, n)] for n in (40, 131, 77, 90)]


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("entries", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_speculation_emits_the_tokens_of_plain_decoding(temperature, entries, quantize):
    """Rows of different lengths that accept different drafts; near-ties are frequent in so few bits."""
    if not linear_cpp.takes(torch.empty(64, 64)):
        pytest.skip("the CPU lacks products in bfloat16 and 8 bits, or a compiler")
    model = load_model("none", load_format="dummy", config=CONFIG, dtype=torch.bfloat16, quantize=quantize)
    model.backend, _ = select_backend("cpp", "cpu", attention_spec(CONFIG, torch.bfloat16), entries)
    use_pointwise(model, pointwise_beside(model.backend))
    runner = ModelRunner(model, FullKVCache(CONFIG, 4, 256, dtype=entries))
    drafter = SelfSpeculation(runner, StreamingKVCache(CONFIG, 4, budget=32, dtype=entries), gamma=3)
    how = {"max_new_tokens": [60, 50, 60, 40], "sampling": SamplingParams(temperature=temperature, seed=5)}
    mode = "coupled" if temperature else "greedy"
    plain = generate(runner, PROMPTS, **how, verification=mode)
    speculative = generate(runner, PROMPTS, drafter=drafter, **how, verification=mode)
    assert speculative.tokens == plain.tokens
    accepted = [row.acceptance_rate for row in speculative.stats.rows]
    assert len({*accepted}) > 1 and 0 < sum(accepted) < len(accepted)
