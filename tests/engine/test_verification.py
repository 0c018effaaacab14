"""Verification is exact: its law recovered from the outside, a narrow chi-square, edge cases."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.modes import Drafts, Rejection
from engine.sampling.distribution import Filters, SamplingParams, logits_to_probs
from engine.verification import verify_rejection
from tests.support.black_box import FAMILIES, law_pairs, recovered_laws
from tests.support.statistics_tools import chi_square, upper_tail

PAIRS = int(os.environ.get("LAW_PAIRS", "2000"))
PAIRS_PER_EXAMPLE = 64


def exact_law_error(
    family: str, seed: int, vocab: int, n_drafts: int, ragged: bool, has_probs: bool
) -> tuple[float, int]:
    """The largest |law - p| of a batch of pairs, and how many of them judge a draft: the rest is a bonus.

    The rows' other positions hold laws of the same family.
    """
    n, generator = PAIRS_PER_EXAMPLE, torch.Generator().manual_seed(seed)
    p, q = law_pairs(family, n * (n_drafts + 1), vocab, generator)
    p, q = p.reshape(n, n_drafts + 1, vocab), q.reshape(n, n_drafts + 1, vocab)[:, :-1]
    lengths = torch.randint(n_drafts + 1, (n,), generator=generator) if ragged else None
    real = torch.full((n,), n_drafts) if lengths is None else lengths
    position = (torch.rand(n, generator=generator) * (real + 1)).long()
    laws, is_bonus = recovered_laws(p, q if has_probs else None, lengths, position)
    rows = torch.arange(n)
    wanted = p[rows, position]
    if has_probs:
        q_here = q[rows, position.clamp(max=n_drafts - 1)]
        averaged = (q_here[..., None] * laws).sum(dim=1)
        laws = torch.where(is_bonus[:, None, None], laws, averaged[:, None])
    return float((laws - wanted[:, None]).abs().max()), int((~is_bonus).sum())


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_emitted_law_is_exactly_p(family, has_probs, record_property):
    """Summed over the drafts that q draws; for a draft without probabilities, whichever it is."""
    errors, judged = [], []
    n_examples = math.ceil(PAIRS / (len(FAMILIES) * PAIRS_PER_EXAMPLE))

    @settings(deadline=None, derandomize=True, database=None, max_examples=n_examples)
    @given(st.integers(0, 2**31), st.integers(2, 8), st.integers(1, 3), st.booleans())
    def check(seed, vocab, n_drafts, ragged):
        error, n_judged = exact_law_error(family, seed, vocab, n_drafts, ragged, has_probs)
        errors.append(error)
        judged.append(n_judged)
        assert errors[-1] < 1e-12

    check()
    kind = "pairs (p, q)" if has_probs else "laws p, drafts without probabilities"
    record_property(f"count: exact law, {kind}, a draft judged", sum(judged))
    record_property(f"count: exact law, {kind}, a bonus", len(errors) * PAIRS_PER_EXAMPLE - sum(judged))
    record_property(f"max: exact law, {kind}: error", max(errors))


WAYS = [SamplingParams(1.0, seed=3 << 40), SamplingParams(0.7, 6, 0.99, seed=5)]


@pytest.mark.parametrize("params", WAYS, ids=lambda params: f"seed {params.seed}")
def test_narrow_chi_square_with_the_engines_own_noise(params, record_property):
    """A draft of the target's law in reverse order is rejected about 70% of the time.

    That is where numbers shared between drafting, accepting and resampling bend the law most.
    """
    n_rows, vocab, gamma = 200_000, 8, 2
    ranks = torch.arange(vocab, dtype=torch.float64)
    target_logits = math.log(0.65) * torch.stack([ranks, ranks.roll(3), ranks.flip(0)])
    draft_logits = target_logits.flip(-1)
    batch = Batch(n_rows, Filters.of([params]))
    batch.set_rows([params] * n_rows, range(n_rows))
    batch.set_state([row % 5 + 10 for row in range(n_rows)], [0] * n_rows, [0] * n_rows)
    decision = Rejection(batch)
    drawn = [decision.draw(draft_logits[i].expand(n_rows, -1), i) for i in range(gamma)]
    drafts = Drafts(torch.stack([token for token, _ in drawn], 1), torch.stack([law for _, law in drawn], 1))
    verdict = decision.verify(drafts, target_logits.expand(n_rows, -1, -1))

    p, q = logits_to_probs(target_logits, params), logits_to_probs(draft_logits, params)
    rejected = verdict.num_accepted == 0
    rate = float(rejected.double().mean())
    assert 0.6 < rate < 0.8 or params.top_k
    first = torch.where(rejected, verdict.next_token, drafts.tokens[:, 0])
    second = torch.where(verdict.num_accepted == 1, verdict.next_token, drafts.tokens[:, -1])
    assert not p[0, first].eq(0).any(), "a token that the target's filters exclude"
    first_p = upper_tail(*chi_square(first.bincount(minlength=vocab), p[0] * n_rows))
    # Every outcome: a rejection and its token, or an accepted draft and the token after it, which is free of it.
    both = torch.where(rejected, first, vocab + first * vocab + second)
    accepted_law = torch.minimum(p[0], q[0])[:, None] * p[1]
    law = torch.cat([(p[0] - q[0]).clamp(min=0), accepted_law.flatten()])
    both_p = upper_tail(*chi_square(both.bincount(minlength=len(law)), law * n_rows))
    name = f"narrow chi-square, seed {params.seed}, {rate:.1%} rejected"
    record_property(f"p-value: {name}: first token", first_p)
    record_property(f"p-value: {name}: every outcome", both_p)
    assert first_p > 1e-4 and both_p > 1e-4


ALMOST_ONE = 1 - 2.0**-53


def emitted(p, q, draft, u, noise) -> tuple[int, int]:
    """The verdict of one draft in one row, whose bonus law is p's last row."""
    laws = None if q is None else torch.tensor([[q]], dtype=torch.float64)
    p, noise = torch.tensor([p], dtype=torch.float64), torch.tensor([noise], dtype=torch.float64)
    u = torch.tensor([[u]], dtype=torch.float64)
    verdict = verify_rejection(torch.tensor([[draft]]), laws, p, u, noise)
    return int(verdict.num_accepted), int(verdict.next_token)


def test_a_draft_without_target_mass_is_never_accepted_nor_emitted():
    """Not at u = 0, not where the draft's law excludes it as well, not by the largest noise."""
    p = [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
    for q in ([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], None):
        for u in (0.0, 0.5, ALMOST_ONE):
            accepted, token = emitted(p, q, 0, u, [36.0, 0.0, 0.0])
            assert accepted == 0 and token in (1, 2)


def test_a_residual_without_mass_falls_back_to_p():
    """Only rounding leads there: q is above p at the draft, and nowhere below."""
    p = [[0.5, 0.5], [0.0, 1.0]]
    assert emitted(p, [0.5, 0.6], 1, 0.99, [0.0, 1.0]) == (0, 1)
    assert emitted(p, [0.5, 0.6], 1, 0.99, [1.0, 0.0]) == (0, 0)
    assert emitted([[0.0, 0.0], [0.0, 1.0]], None, 1, 0.5, [0.0, 0.0])[0] == 0


@pytest.mark.parametrize("q", [[math.nan] * 3, [0.2, math.nan, 0.5]])
def test_a_draft_law_that_is_not_a_number_is_rejected_and_p_decides(q):
    p = [[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]]
    assert emitted(p, q, 1, 0.0, [0.0, 0.0, 99.0]) == (0, 0)
    assert emitted(p, q, 1, 0.0, [0.0, 2.0, 99.0]) == (0, 1)
