"""The certificate of production precision: what it counts, and that it can fail."""

import math
from pathlib import Path

import pytest
import torch
from certificate_cases import (
    DTYPES,
    GAMMA,
    LENGTHS,
    MODES,
    PROMPTS,
    Faulty,
    calibration_of,
    certificate_of,
    other_kernels,
    scores_by_recomputing,
    speculate,
    with_blocks,
)
from tiny import TINY, full_cache, random_prompts, tiny_model

from common.errors import UserError
from engine.evaluation.certificate import Replay, calibrate, certify, replay

ROOT = Path(__file__).resolve().parents[1]


@MODES
@DTYPES
def test_blocks_that_round_otherwise_flip_near_ties_and_the_certificate_holds(sampling, dtype):
    model = with_blocks(tiny_model(dtype=dtype), other_kernels)
    calibration = calibration_of(model)
    assert 0.19 < calibration.eps < 0.3
    assert 0 < calibration.flips < calibration.positions / 4
    result = certificate_of(model, speculate(model, sampling), sampling)
    assert 0 < result.flips < result.near_ties < result.tokens / 2
    assert result.largest_gap_at_flip is not None
    assert 0 < result.largest_gap_at_flip < 2 * calibration.eps / (sampling.temperature or 1)
    assert result.holds


@MODES
def test_the_reference_scores_what_was_emitted_given_what_was_emitted(sampling):
    """Tokens that nobody would choose; gaps and deficits as one forward over the whole sequence gives them."""
    model = tiny_model()
    emitted = torch.tensor(random_prompts([12] * len(PROMPTS), seed=3))
    seen = replay(model, full_cache(model, len(PROMPTS)), PROMPTS, emitted, sampling)
    for row, prompt in enumerate(PROMPTS):
        scores = scores_by_recomputing(model, prompt, emitted[row].tolist(), sampling, row)
        top = scores.topk(2).values
        # The noise of a float64 model is float64, here rounded once to float32.
        torch.testing.assert_close(seen.gap[row], top[:, 0] - top[:, 1], rtol=0, atol=1e-5)
        chosen = scores.gather(1, emitted[row][:, None])[:, 0]
        torch.testing.assert_close(seen.deficit[row], top[:, 0] - chosen, rtol=0, atol=1e-5)
        assert seen.flipped[row].tolist() == (scores.argmax(-1) != emitted[row]).tolist()


@MODES
@DTYPES
def test_a_faulty_verification_is_found(sampling, dtype):
    model = tiny_model(dtype=dtype)
    emitted = speculate(model, sampling, Faulty)
    assert 2 * calibration_of(model).eps < Faulty.size
    result = certificate_of(model, emitted, sampling)
    assert 0 < result.flips_outside_near_ties <= result.flips
    assert not result.holds


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


def test_logits_that_are_not_finite_certify_nothing():
    model = tiny_model()
    prompts, text = random_prompts(LENGTHS, 60), torch.tensor(random_prompts([8] * len(LENGTHS), 60))
    text[1, 4] = 60
    model.tok_embeddings.weight.data[60] = math.nan
    model.output = torch.nn.Linear(TINY.dim, TINY.vocab_size, bias=False, dtype=torch.float64).requires_grad_(False)
    cache = full_cache(model, len(prompts))
    with pytest.raises(UserError, match=f"calibration.*\n.*row 1, the token at position {LENGTHS[1] + 4}"):
        calibrate(model, cache, prompts, text, GAMMA + 1)
    with pytest.raises(UserError, match=f"reference.*\n.*row 1, the token at position {LENGTHS[1] + 5}"):
        replay(model, cache, prompts, text)
