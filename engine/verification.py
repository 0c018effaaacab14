"""Which drafted tokens the target accepts, and the one token that it adds: pure functions over the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling import greedy


class Verdict(NamedTuple):
    """Per row: `num_accepted [B]` int64 drafts kept, then `next_token [B]` int64 (recovered, or bonus)."""

    num_accepted: Tensor
    next_token: Tensor


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor, draft_lengths: Tensor | None = None) -> Verdict:
    """Accept drafts while they equal the target's argmax, then emit the target's argmax.

    Greedy case of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, section 2.3).

    Args:
        draft_tokens: `[B, g]` int64; g may be 0.
        target_logits: `[B, g + 1, V]`; entry i is the law of the token after i drafts.
        draft_lengths: `[B]` int64, how many of a row's g drafts are real; all of them if None.
    """
    choice = greedy(target_logits)
    agrees = draft_tokens == choice[:, :-1]
    if draft_lengths is not None:
        index = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
        agrees &= index < draft_lengths[:, None]
    num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    return Verdict(num_accepted, choice.gather(1, num_accepted[:, None]).squeeze(1))
