"""Verification: which drafts the target accepts, and the token that it adds; pure functions over the batch.

Everywhere `draft_tokens [B, g]` int64 are the drafts (g may be 0), entry i of a target tensor `[B, g + 1, V]` belongs
to the token after i drafts, and `draft_lengths [B]` int64 is each row's number of drafts, g if None. No function reads
a value back to the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.distribution import argmax


class Verdict(NamedTuple):
    """Each row keeps `num_accepted [B]` drafts, then adds `next_token [B]` (recovered, or bonus); both int64."""

    num_accepted: Tensor
    next_token: Tensor


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor, draft_lengths: Tensor | None = None) -> Verdict:
    """Accept drafts while they equal the target's argmax, then emit the target's argmax: the greedy case of speculative
    decoding (Leviathan et al. 2023, arXiv 2211.17192, section 2.3)."""
    return _accept_equal(draft_tokens, argmax(target_logits), draft_lengths)


def verify_coupled(
    draft_tokens: Tensor, target_logprobs: Tensor, gumbel: Tensor, draft_lengths: Tensor | None = None
) -> Verdict:
    """Accept drafts while they equal the target's draw, `argmax(log p + gumbel)`, then emit that draw.

    Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978, section 4): the emitted tokens depend on p and on the noise
    alone. A drafter that takes the argmax of `log q + gumbel` with the same noise is accepted the more often the closer
    q is to p. `target_logprobs` are -inf where p is 0; `gumbel [B, g + 1, V]` is keyed by the position of the token
    that each entry draws.
    """
    return _accept_equal(draft_tokens, argmax(target_logprobs + gumbel), draft_lengths)


def verify_rejection(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniform: Tensor,
    resample_gumbel: Tensor,
    draft_lengths: Tensor | None = None,
) -> Verdict:
    """Speculative sampling: the emitted tokens are distributed as the target's (Leviathan et al. 2023,
    arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2).

    Draft d is accepted iff `u * q(d) < p(d)`; the first rejection is replaced by a draw from the normalised
    `max(p - q, 0)`, and a row without a rejection adds a draw from p.

    draft_probs: `[B, g, V]`, the very distributions that the drafts were drawn from; None for a drafter without
    probabilities, each of whose drafts counts as a point mass. accept_uniform: `[B, g]` in [0, 1), independent of the
    numbers that drew the drafts. resample_gumbel: `[B, V]`, independent of both; each row draws once.
    """
    p_of_draft = target_probs[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    if draft_probs is None:
        q_of_draft = torch.ones_like(p_of_draft)
    else:
        q_of_draft = draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)
    # Strict, and in float64, where u * q rounds to q for no u below 1: p == q never rejects, p == 0 never accepts.
    accepted = accept_uniform.double() * q_of_draft.double() < p_of_draft.double()
    num_accepted = _leading_true(accepted, draft_lengths)
    row = torch.arange(len(draft_tokens), device=draft_tokens.device)
    p = target_probs[row, num_accepted]
    residual = p if draft_tokens.shape[1] == 0 else _residual(p, draft_tokens, draft_probs, num_accepted, draft_lengths)
    return Verdict(num_accepted, argmax(residual.log() + resample_gumbel))


def _residual(
    p: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, num_accepted: Tensor, draft_lengths: Tensor | None
) -> Tensor:
    """Return the unnormalised distribution of the next token: `max(p - q, 0)` after a rejection, else `p [B, V]`, and
    also p where rounding left the residual without mass."""
    n_drafts = draft_tokens.shape[1]
    index = num_accepted.clamp(max=n_drafts - 1)
    if draft_probs is None:
        rejected_draft = draft_tokens.gather(1, index[:, None])
        residual = p.scatter(1, rejected_draft, 0.0)
    else:
        row = torch.arange(len(p), device=p.device)
        residual = (p - draft_probs[row, index]).clamp(min=0)
    was_rejected = num_accepted < (n_drafts if draft_lengths is None else draft_lengths)
    has_mass = residual.sum(dim=-1) > 0
    return torch.where((was_rejected & has_mass)[:, None], residual, p)


def _accept_equal(draft_tokens: Tensor, choice: Tensor, draft_lengths: Tensor | None) -> Verdict:
    """Accept drafts while they equal the target's `choice [B, g + 1]`, then emit that choice."""
    num_accepted = _leading_true(draft_tokens == choice[:, :-1], draft_lengths)
    return Verdict(num_accepted, choice.gather(1, num_accepted[:, None]).squeeze(1))


def _leading_true(accepted: Tensor, draft_lengths: Tensor | None) -> Tensor:
    """Return how many drafts of each row stand before its first rejection, or its last draft."""
    if draft_lengths is not None:
        index = torch.arange(accepted.shape[1], device=accepted.device)
        accepted = accepted & (index < draft_lengths[:, None])
    return accepted.long().cumprod(dim=1).sum(dim=1)
