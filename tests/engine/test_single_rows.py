"""A row that decodes alone is computed alone where kernels multiply, with the bits that it has next to other rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import Decoder, ModelRunner, Request, SelfSpeculation
from engine.sampling.distribution import SamplingParams
from kv_cache import FullKVCache, StreamingKVCache
from models import ModelConfig, Transformer
from models.attention.cpp_backend import CppAttention
from models.checkpoints.loading import pack_model
from models.kernels.pointwise_cpp import pointwise_for
from models.kernels.row_bits import fewest_rows
from tests.support.machine import needs_cpp_compiler
from tests.support.tiny import decode, random_prompts, tiny_model

pytestmark = needs_cpp_compiler
CONFIG = ModelConfig(
    vocab_size=320, n_layer=2, dim=128, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=160, max_context=256
)
LIMITS = (6, 60, 15)


def decoded(monkeypatch, sampling: SamplingParams, drafts: bool, fewest: int) -> tuple[list[Any], set[int]]:
    """Decode three prompts in four rows, which end one after the other; return their tokens, and the numbers of rows of
    the target's forwards. fewest: the fewest rows that rounds compute, if the runner computes fewer."""
    model = tiny_model(CONFIG, dtype=torch.float32)
    pack_model(model)
    model.backend, model.pointwise = CppAttention(), pointwise_for("cpp")
    runner = ModelRunner(model, FullKVCache(CONFIG, 4, 96), fewest_rows=fewest_rows(model))
    n_computed, numbers, step = runner.n_computed, set[int](), runner.step
    monkeypatch.setattr(runner, "n_computed", lambda *given: max(fewest, n_computed(*given)))
    monkeypatch.setattr(runner, "step", lambda tokens, *given: numbers.add(len(tokens)) or step(tokens, *given))
    drafter = SelfSpeculation(runner, StreamingKVCache(CONFIG, 4, 16), 3) if drafts else None
    params = [replace(sampling, seed=seed) for seed in range(3)]
    prompts = random_prompts([9, 14, 20], CONFIG.vocab_size)
    requests = [Request(p, n, sampling=each) for p, n, each in zip(prompts, LIMITS, params, strict=True)]
    decode(Decoder(runner, drafter=drafter, verification="coupled"), *requests)
    return [request.tokens for request in requests], numbers


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    "sampling,fewest", [(SamplingParams(), 1), (SamplingParams(1.0), 1), (SamplingParams(1.0, top_p=0.8), 2)]
)
def test_a_row_alone_has_the_tokens_that_it_has_next_to_others(monkeypatch, sampling, fewest, drafts):
    found, numbers = decoded(monkeypatch, sampling, drafts, 1)
    assert min(numbers) == fewest
    assert found == decoded(monkeypatch, sampling, drafts, 4)[0]


def test_logits_of_a_row_alone_have_the_bits_of_rows_together():
    model: Transformer = tiny_model(CONFIG, dtype=torch.float32)
    pack_model(model)
    model.backend, model.pointwise = CppAttention(), pointwise_for("cpp")
    tokens, positions = torch.tensor(random_prompts([12] * 4, CONFIG.vocab_size)), torch.arange(12).expand(4, -1)
    cache = FullKVCache(CONFIG, 4, 96)
    model(tokens, positions, cache)
    for n_token in (1, 3):
        at = positions[:, :n_token] + 12
        together = model(tokens[:, :n_token], at, cache)
        for row in range(4):
            view = cache.view(slice(row, row + 1))
            assert torch.equal(model(tokens[row : row + 1, :n_token], at[:1], view), together[row : row + 1])
