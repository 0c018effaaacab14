"""What the certificate's tests share: models whose blocks go wrong, speculation, and its certificate."""

from collections.abc import Callable

import pytest
import torch
from tiny import TINY, full_cache, random_prompts
from torch import Tensor

from engine import ModelRunner, SamplingParams, SelfSpeculation, generate
from engine.evaluation.certificate import Calibration, Certificate, calibrate, certify, replay
from engine.noise import Stream, gumbel
from kv_cache import FullKVCache, StreamingKVCache, WriteThroughKVCache
from models import Transformer

LENGTHS, N_NEW, N_FORCED, GAMMA = [9, 14, 23], 40, 48, 3
PROMPTS, FORCED = random_prompts(LENGTHS), torch.tensor(random_prompts([N_FORCED] * len(LENGTHS), seed=1))
GREEDY, COUPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=5)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
MODES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])


def noise_like(logits: Tensor, size: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * (2 * torch.rand(logits.shape, generator=generator) - 1).to(logits.dtype)


class Faulty(ModelRunner):
    """Its verifications are off by up to `size`; one-token forwards and what is not speculation are right."""

    size = 3.0

    def step(self, tokens, positions, cache=None):
        logits = super().step(tokens, positions, cache)
        verifies = isinstance(cache, WriteThroughKVCache)
        return logits + noise_like(logits, self.size, cache.positions.shape[1]) if verifies else logits


def with_blocks(model: Transformer, change: Callable[[Tensor, Tensor], Tensor]) -> Transformer:
    """Forwards of more than one token give `change(logits [B, T, V], positions [B, T])`, whoever runs them."""

    class Changed(Transformer):
        def forward(self, tokens, positions, cache):
            logits = super().forward(tokens, positions, cache)
            return logits if tokens.shape[1] == 1 else change(logits, positions)

    model.__class__ = Changed
    return model


def other_kernels(logits: Tensor, positions: Tensor) -> Tensor:
    """A large model in low precision rounds otherwise by itself; one as small as these nearly always alike."""
    return logits + noise_like(logits, 0.2, int(positions.sum()))


def speculate(
    model: Transformer, sampling: SamplingParams, runner_class=ModelRunner, cache: FullKVCache | None = None
) -> Tensor:
    """Self-speculation's tokens `[B, N_NEW]`; rows differ in length and in how many drafts they accept."""
    runner = runner_class(model, cache or full_cache(model, len(PROMPTS)))
    draft_cache = StreamingKVCache(model.config, len(PROMPTS), budget=14, n_sink=2, dtype=runner.cache.keys.dtype)
    mode = "greedy" if sampling.greedy else "coupled"
    drafter = SelfSpeculation(runner, draft_cache, GAMMA)
    out = generate(runner, PROMPTS, max_new_tokens=N_NEW, drafter=drafter, sampling=sampling, verification=mode)
    assert 0 < out.stats.accepted < out.stats.drafted
    assert len({row.accepted for row in out.stats.rows}) > 1
    return torch.tensor(out.tokens)


def calibration_of(model: Transformer, cache: FullKVCache | None = None) -> Calibration:
    """Of as many prompts as the cache has rows."""
    cache = cache or full_cache(model, len(PROMPTS))
    return calibrate(model, cache, PROMPTS[: cache.max_batch], FORCED[: cache.max_batch], GAMMA + 1)


def certificate_of(model: Transformer, emitted: Tensor, sampling: SamplingParams) -> Certificate:
    eps = calibration_of(model).eps / (sampling.temperature or 1)
    return certify(replay(model, full_cache(model, len(PROMPTS)), PROMPTS, emitted, sampling), eps)


def scores_by_recomputing(
    model: Transformer, prompt: list[int], emitted: list[int], sampling: SamplingParams, row: int
) -> Tensor:
    """What each of a row's tokens is the argmax of, `[n, V]`, from one forward over the whole sequence."""
    tokens = prompt + emitted
    logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], full_cache(model, 1))
    logits = logits[0, len(prompt) - 1 : -1].double()
    if sampling.greedy:
        return logits
    position = torch.arange(len(prompt), len(tokens))
    noise = gumbel(torch.tensor(sampling.seed), torch.tensor(row), position, Stream.COUPLED, TINY.vocab_size)
    return (logits / sampling.temperature).log_softmax(-1) + noise.double()
