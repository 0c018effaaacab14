"""In bfloat16 the CPU kernels give a verification the bits of single steps: speculation emits plain decoding's text."""

import pytest
import torch

from engine import ModelRunner, SamplingParams, SelfSpeculation, generate
from kv_cache import FullKVCache, StreamingKVCache
from models import ModelConfig, linear_cpp, load_model
from models.attention import select_backend
from models.llama import attention_spec
from models.pointwise import use_pointwise
from models.pointwise_cpp import pointwise_beside

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
