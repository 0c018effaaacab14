"""Tiny Llamas with random weights, and plain ways to continue a prompt."""

import math
from typing import Any

import torch

from engine import Decoder, ModelRunner, Request, SelfSpeculation
from engine.batch import Batch
from engine.evaluation import reference
from engine.evaluation.reference import NextLogits
from engine.sampling.distribution import Filters, SamplingParams
from kv_cache import FullKVCache, Policy
from models import ModelConfig, Transformer

TINY = ModelConfig(vocab_size=61, n_layer=2, dim=32, n_head=4, n_kv_head=2, head_dim=8, ffn_dim=48, max_context=256)


def tiny_model(config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a model with random weights, large enough that attention matters to the argmax."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config).to(dtype)
    for parameter in model.parameters():
        std = 0.5 if parameter.dim() > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        parameter.data.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model.eval().requires_grad_(False)


def near_model() -> Transformer:
    """Return a model close to the tiny model, which accepts some of its drafts."""
    model = tiny_model()
    for parameter, other in zip(model.parameters(), tiny_model(seed=1).parameters(), strict=True):
        parameter.data += 0.05 * other.data
    return model


def random_prompts(lengths: list[int], vocab_size: int = TINY.vocab_size, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def full_cache(
    model: Transformer, max_batch: int, max_len: int = 128, kv_dtype: torch.dtype | None = None
) -> FullKVCache:
    """Return an empty cache, in the model's dtype by default."""
    return FullKVCache(model.config, max_batch, max_len, dtype=kv_dtype or model.dtype)


def tiny_runner(n_rows: int, **settings: Any) -> ModelRunner:
    """Return a runner of the tiny model over a full cache; settings are ModelRunner's."""
    model = tiny_model()
    return ModelRunner(model, full_cache(model, n_rows), **settings)


def batch_at(lengths: list[int], current: list[int]) -> Batch:
    """Return a batch of greedy rows whose last tokens, `current`, are at positions `lengths`."""
    batch = Batch(len(lengths), Filters())
    batch.set_state(lengths, [0] * len(lengths), current)
    return batch


def self_draft(runner: ModelRunner, policy: Policy, gamma: int) -> SelfSpeculation:
    """Return a self-draft over a cache of `policy`, for the runner's rows and longest text."""
    shape = runner.model.config, runner.max_batch, runner.cache.capacity
    return SelfSpeculation(runner, policy.new_cache(*shape, "cpu", runner.model.dtype), gamma)


def decode(decoder: Decoder, *requests: Request) -> None:
    """Submit requests, and step until all are decoded."""
    for request in requests:
        decoder.submit(request)
    while not decoder.idle:
        decoder.step()


def recomputing(model: Transformer, kv_dtype: torch.dtype | None = None) -> NextLogits:
    """Return a function that runs a whole text anew, in an empty cache, for the logits `[V]` after it."""

    def next_logits(text: list[int]) -> torch.Tensor:
        cache = full_cache(model, 1, len(text), kv_dtype)
        return model(torch.tensor([text]), torch.arange(len(text))[None], cache)[0, -1]

    return next_logits


def continue_plainly(
    next_logits: NextLogits, prompt: list[int], n_tokens: int, sampling: SamplingParams | None = None, request: int = 0
) -> list[int]:
    """Return the tokens of plain decoding, in the coupled mode if it samples."""
    sampling = sampling or SamplingParams()
    mode = "greedy" if sampling.greedy else "coupled"
    return reference.decode(next_logits, prompt, n_tokens, sampling, mode, request)


def continue_by_recomputing(model: Transformer, *how: Any) -> list[int]:
    """Return `continue_plainly` of a model; every token runs the whole text anew. how: from the prompt on."""
    return continue_plainly(recomputing(model), *how)


def recomputed(
    model: Transformer, prompts: list[list[int]], limits: int | list[int], sampling: SamplingParams | None = None
) -> list[list[int]]:
    """Return `continue_by_recomputing` of several prompts, with request ids 0, 1, ..."""
    each = zip(prompts, limits if isinstance(limits, list) else [limits] * len(prompts), strict=True)
    return [continue_by_recomputing(model, prompt, n, sampling, i) for i, (prompt, n) in enumerate(each)]


def weights_by_lists(query: torch.Tensor, keys: torch.Tensor) -> list[float]:
    """Return the softmax of scaled scores of a query `[D]` over keys `[n, D]`, in Python's numbers."""
    scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]
