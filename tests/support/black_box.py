"""The laws that `verify_rejection` realises, found from the outside, and pairs of laws to put to it."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.sampling.distribution import SamplingParams, logits_to_probs
from engine.verification import Verdict, verify_rejection

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
