"""Verification is exact: its law recovered from the outside, a narrow chi-square, edge cases."""

import math
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch
from engine.modes import Drafts, Rejection
from engine.sampling.distribution import Filters, SamplingParams, logits_to_probs
from engine.verification import Verdict, verify_rejection
from tests.support.table_law import chi_square, upper_tail

PAIRS = int(os.environ.get("LAW_PAIRS", "2000"))
PAIRS_PER_EXAMPLE = 64
HALVINGS = 56
FAR = 60.0  # exp(-60) is nothing next to 1e-12
CERTAIN = -1e9
FAMILIES = ("random", "zeros in p", "zeros in q", "disjoint", "equal", "point masses", "ties", "filtered logits")
FAMILIES += ("nearly equal",)


def random_laws(n: int, vocab: int, generator: torch.Generator) -> Tensor:
    """`[n, vocab]` float64: from flat to spiky."""
    spread = 4 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return (spread * torch.randn(n, vocab, generator=generator, dtype=torch.float64)).softmax(dim=-1)


def with_zeros(laws: Tensor, generator: torch.Generator) -> Tensor:
    """About half of the entries become 0, one at least stays."""
    kept = torch.rand(laws.shape, generator=generator) < 0.5
    kept |= torch.nn.functional.one_hot(laws.argmax(dim=-1), laws.shape[-1]).bool()
    laws = torch.where(kept, laws, 0.0)
    return laws / laws.sum(dim=-1, keepdim=True)


def law_pairs(family: str, n: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`p` and `q`, `[n, vocab]` float64, of one of the `FAMILIES`."""
    p, q = random_laws(n, vocab, generator), random_laws(n, vocab, generator)
    if family == "zeros in p":
        p = with_zeros(p, generator)
    elif family == "zeros in q":
        q = with_zeros(q, generator)
    elif family == "disjoint":
        side = torch.rand(n, vocab, generator=generator) < 0.5
        side[:, 0], side[:, 1] = True, False
        p, q = (x / x.sum(dim=-1, keepdim=True) for x in (p * side, q * ~side))
    elif family == "equal":
        q = p.clone()
    elif family == "point masses":
        ids = torch.randint(vocab, (2, n), generator=generator)
        p, q = (torch.nn.functional.one_hot(x, vocab).double() for x in ids)
        soft = torch.rand(2, n, 1, generator=generator) < 0.3
        p, q = torch.where(soft[0], random_laws(n, vocab, generator), p), torch.where(soft[1], p.flip(1), q)
    elif family == "ties":
        p, q = (torch.randint(1, 4, (n, vocab), generator=generator).double() for _ in range(2))
        p, q = p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)
    elif family == "filtered logits":
        logits = torch.randint(-6, 7, (2, n, vocab), generator=generator).double() / 2
        params = SamplingParams(temperature=0.7, top_k=max(1, vocab - 1), top_p=0.85)
        p, q = logits_to_probs(logits, params)
    elif family == "nearly equal":
        size = 10.0 ** -torch.randint(3, 17, (n, 1), generator=generator).double()
        q = p * (1 + size * torch.randn(n, vocab, generator=generator, dtype=torch.float64))
        q = q / q.sum(dim=-1, keepdim=True)
    return p, q


def bisected(is_above: Callable[[Tensor], Tensor], high: Tensor) -> Tensor:
    """Return where in 0 to `high` the answers to `is_above` change from true to false."""
    low = torch.zeros_like(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = is_above(middle)
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


class BlackBox:
    """The laws that `verify_rejection` realises, found by bisecting the numbers that it is given.

    `p [N, g + 1, V]`; `q [N, g, V]` or None; `lengths [N]` or None. Rows are the drafts `[R, g]` put to
    the pairs `pair [R]`.
    """

    def __init__(self, p: Tensor, q: Tensor | None, lengths: Tensor | None) -> None:
        self.p, self.q, self.lengths = p, q, lengths

    def verify(self, pair: Tensor, drafts: Tensor, u: Tensor, noise: Tensor) -> Verdict:
        lengths = None if self.lengths is None else self.lengths[pair]
        q = None if self.q is None else self.q[pair]
        return verify_rejection(drafts, q, self.p[pair], u, noise, lengths)

    def acceptance(self, pair: Tensor, drafts: Tensor, position: Tensor) -> Tensor:
        """P(the draft at `position [R]` is accepted), those before it being accepted: `[R]` float64."""
        vocab, rows = self.p.shape[-1], torch.arange(len(pair))
        noise = torch.zeros(len(pair), vocab, dtype=torch.float64)

        def accepted(threshold: Tensor) -> Tensor:
            u = torch.zeros(drafts.shape, dtype=torch.float64)
            u[rows, position] = threshold
            return self.verify(pair, drafts, u, noise).num_accepted > position

        last = torch.full((len(pair),), 1 - 2.0**-53, dtype=torch.float64)
        never, always = ~accepted(torch.zeros_like(last)), accepted(last)
        return torch.where(never, 0.0, torch.where(always, 1.0, bisected(accepted, last)))

    def choice(self, pair: Tensor, drafts: Tensor, u: Tensor) -> Tensor:
        """The law of `next_token` over the resampling noise, `[R, V]`: of log-odds against the likeliest."""
        vocab = self.p.shape[-1]
        flat = torch.zeros(len(pair), vocab, dtype=torch.float64)
        likeliest = self.verify(pair, drafts, u, flat).next_token.repeat_interleave(vocab)
        pair, drafts, u = (x.repeat_interleave(vocab, dim=0) for x in (pair, drafts, u))
        token = torch.arange(vocab).repeat(len(flat))

        def chosen(offset: Tensor) -> Tensor:
            noise = torch.full((len(pair), vocab), CERTAIN, dtype=torch.float64)
            noise.scatter_(1, likeliest[:, None], 0.0).scatter_(1, token[:, None], offset[:, None])
            return self.verify(pair, drafts, u, noise).next_token == token

        far = torch.full((len(pair),), FAR, dtype=torch.float64)
        weight = torch.where(chosen(far), (-bisected(lambda offset: ~chosen(offset), far)).exp(), 0.0)
        weight = torch.where(token == likeliest, 1.0, weight).reshape(-1, vocab)
        return weight / weight.sum(dim=-1, keepdim=True)


def recovered_laws(p: Tensor, q: Tensor | None, lengths: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor]:
    """The law of the token at each pair's `position [N]` for every draft there, and whether it is a bonus.

    Drafts before the position are accepted (u = 0; they are the target's likeliest). Returns
    `laws [N, V, V]`, entry `[n, d]` being a(d) * 1{d} + (1 - a(d)) * residual, and `is_bonus [N]`.
    """
    n, n_drafts, vocab = len(p), p.shape[1] - 1, p.shape[2]
    box = BlackBox(p, q, lengths)
    pair, draft = torch.arange(n).repeat_interleave(vocab), torch.arange(vocab).repeat(n)
    drafts, at = p[:, :-1].argmax(dim=-1)[pair], position[pair]
    is_bonus = position == (torch.full_like(position, n_drafts) if lengths is None else lengths)
    inside = at.clamp(max=n_drafts - 1)
    drafts[torch.arange(len(pair)), inside] = torch.where(at < n_drafts, draft, drafts[:, -1])
    u = torch.zeros(drafts.shape, dtype=torch.float64)
    a = box.acceptance(pair, drafts, inside)
    a = torch.where(is_bonus[pair], 0.0, a)
    # A rejection by a hair and the surest one must lead to the same residual.
    laws = []
    for u_rejects in (a + (1 - a) / 64, torch.ones_like(a)):
        u[torch.arange(len(pair)), inside] = torch.where(is_bonus[pair], 0.0, u_rejects.clamp(max=1 - 2.0**-53))
        residual = box.choice(pair, drafts, u)
        emitted = torch.nn.functional.one_hot(draft, vocab) * a[:, None] + (1 - a)[:, None] * residual
        laws.append(emitted.reshape(n, vocab, vocab))
    assert float((laws[0] - laws[1]).abs().max()) < 1e-12, "the residual depends on u"
    return laws[0], is_bonus


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
