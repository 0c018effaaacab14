"""The certificate of production precision: what it counts, the bound that it measures, and that it can fail."""

import pytest
import torch
from torch import Tensor

from engine import ModelRunner, SamplingParams, generate
from engine.evaluation.certificate import Calibration, Replay, calibrate, certify, replay
from engine.sampling.noise import Stream, gumbel
from kv_cache.streaming import Streaming
from models import Transformer
from tests.support.tiny import TINY, full_cache, random_prompts, self_draft, tiny_model

LENGTHS, N_NEW, N_FORCED, GAMMA = [9, 14, 23], 40, 48, 3
PROMPTS, FORCED = random_prompts(LENGTHS), torch.tensor(random_prompts([N_FORCED] * len(LENGTHS), seed=1))
GREEDY, COUPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=5)


class Rounding(Transformer):
    """A model whose forwards of several tokens round otherwise than those of a token."""

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(int(positions.sum())))
        return logits if tokens.shape[1] == 1 else logits + (0.4 * noise - 0.2).to(logits.dtype)


def speculate(model: Transformer, sampling: SamplingParams) -> Tensor:
    """Tokens of self-speculation `[B, N_NEW]`; rows differ in length and in how many drafts they accept."""
    runner = ModelRunner(model, full_cache(model, len(PROMPTS)))
    mode, drafter = "greedy" if sampling.greedy else "coupled", self_draft(runner, Streaming(14, n_sink=2), GAMMA)
    out = generate(runner, PROMPTS, max_new_tokens=N_NEW, drafter=drafter, sampling=sampling, verification=mode)
    assert 0 < out.stats.accepted < out.stats.drafted
    assert len({row.accepted for row in out.stats.rows}) > 1
    return torch.tensor(out.tokens)


def calibration_of(model: Transformer) -> Calibration:
    return calibrate(model, full_cache(model, len(PROMPTS)), PROMPTS, FORCED, GAMMA + 1)


@pytest.mark.parametrize("sampling,dtype", [(GREEDY, torch.bfloat16), (COUPLED, torch.float64)])
def test_blocks_that_round_otherwise_flip_near_ties_and_the_certificate_holds(sampling, dtype):
    """A large model in low precision rounds otherwise by itself; a small one nearly always alike."""
    model = tiny_model(dtype=dtype)
    model.__class__ = Rounding
    calibration = calibration_of(model)
    assert 0.19 < calibration.eps < 0.3
    assert 0 < calibration.flips < calibration.positions / 4
    seen = replay(model, full_cache(model, len(PROMPTS)), PROMPTS, speculate(model, sampling), sampling)
    result = certify(seen, calibration.eps / (sampling.temperature or 1))
    assert 0 < result.flips < result.near_ties < result.tokens / 2
    assert result.largest_gap_at_flip is not None
    assert 0 < result.largest_gap_at_flip < 2 * calibration.eps / (sampling.temperature or 1)
    assert result.holds


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_reference_scores_what_was_emitted_given_what_was_emitted(sampling):
    """Tokens that nobody would choose; gaps and deficits are those of a forward over the whole sequence."""
    model = tiny_model()
    emitted = torch.tensor(random_prompts([12] * len(PROMPTS), seed=3))
    seen = replay(model, full_cache(model, len(PROMPTS)), PROMPTS, emitted, sampling)
    for row, prompt in enumerate(PROMPTS):
        tokens = prompt + emitted[row].tolist()
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], full_cache(model, 1))
        scores = logits[0, len(prompt) - 1 : -1].double()
        if not sampling.greedy:
            keys = torch.tensor(sampling.seed), torch.tensor(row), torch.arange(len(prompt), len(tokens))
            noise = gumbel(*keys, Stream.COUPLED, TINY.vocab_size)
            scores = (scores / sampling.temperature).log_softmax(-1) + noise.double()
        top = scores.topk(2).values
        # The noise of a float64 model is float64, here rounded once to float32.
        torch.testing.assert_close(seen.gap[row], top[:, 0] - top[:, 1], rtol=0, atol=1e-5)
        chosen = scores.gather(1, emitted[row][:, None])[:, 0]
        torch.testing.assert_close(seen.deficit[row], top[:, 0] - chosen, rtol=0, atol=1e-5)
        assert seen.flipped[row].tolist() == (scores.argmax(-1) != emitted[row]).tolist()


def test_what_counts_as_a_near_tie_and_as_outside():
    eps = 0.5
    seen = Replay(
        gap=torch.tensor([[0.0, 1.0, 1.1, 0.2], [1.5, 2.0, 3.0, 4.0]]),
        deficit=torch.tensor([[0.0, 1.0, 0.0, 1.2], [0.0, 0.0, 0.0, 0.0]]),
        flipped=torch.tensor([[True, True, False, True], [False] * 4]),
    )
    result = certify(seen, eps)
    assert (result.rows, result.tokens, result.near_ties) == (2, 8, 3)
    assert result.flips == 3
    assert result.flips_outside_near_ties == 1, "a near-tie of the top two excuses no third token"
    assert result.largest_gap_at_flip == pytest.approx(1.2)
    assert not result.holds
    assert certify(seen, 0.6).holds


class Reversed(Transformer):
    """A model whose forwards of several tokens, also those of the calibration, take them in reverse order."""

    def forward(self, tokens, positions, cache):
        return super().forward(tokens.flip(1) if tokens.shape[1] == GAMMA + 1 else tokens, positions, cache)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bound_that_measured_a_bug_is_not_trusted(dtype):
    """A wrong forward of several tokens widens eps until everything is a near-tie: the flips give it away."""
    model = tiny_model(dtype=dtype)
    assert calibration_of(model).trusted
    model.__class__ = Reversed
    assert not calibration_of(model).trusted
