"""Costs of a round of speculation, and the speedup that follows from them (MagicDec, arXiv 2408.11049)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.stats import AcceptanceRate

# The fields of `Costs` that are a number of milliseconds each.
MS_OF_ROUNDS = ("plain_ms", "draft_ms", "fixed_ms", "other_ms", "refresh_ms", "resume_ms")


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the expected tokens of a row per round, `(1 - alpha^(gamma + 1)) / (1 - alpha)`: Leviathan et al. 2023
    (arXiv 2211.17192), equation 1. alpha: the probability that a draft is accepted if all drafts before it were."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a batch at a context: a plain step, verifications of `at` draft tokens (ascending), a draft step,
    the rest of a round, and a round's share of refreshing the selection. acceptance: the rate on real text. resume_ms:
    the time in which a draft catches up a few tokens of rounds without it. fixed_ms: the part of drafting that does not
    grow with gamma, most of it for heads that draft in one forward."""

    plain_ms: float
    at: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    other_ms: float
    acceptance: AcceptanceRate | None = None
    refresh_ms: float = 0.0
    resume_ms: float = 0.0
    fixed_ms: float = 0.0

    def drafts_ms(self, gamma: int) -> float:
        return self.fixed_ms + gamma * self.draft_ms

    def verification_ms(self, gamma: int) -> float:
        """Return the ms of verifying `gamma` draft tokens: interpolated, and extrapolated, on straight lines."""
        at, ms = np.array([0, *self.at], dtype=float), np.array([self.plain_ms, *self.verify_ms])
        if gamma > at[-1]:
            return float(ms[-1] + (gamma - at[-1]) * (ms[-1] - ms[-2]) / (at[-1] - at[-2]))
        return float(np.interp(gamma, at, ms))

    def round_ms(self, gamma: int) -> float:
        return self.drafts_ms(gamma) + self.verification_ms(gamma) + self.other_ms + self.refresh_ms

    def catch_up_ms(self, n_missed: float) -> float:
        """Return the ms in which a draft catches up `n_missed` tokens: `resume_ms`, times verify_ms(n) / plain_ms."""
        per_token = max(0.0, self.verify_ms[-1] / self.plain_ms - 1) / self.at[-1]
        return self.resume_ms * (1 + n_missed * per_token)

    def speedup(self, tokens: float, gamma: int) -> float:
        """Return the speedup over plain decoding of rounds that emit `tokens` a row (see `tokens_per_round`)."""
        return tokens * self.plain_ms / self.round_ms(gamma)


def interpolating(size: float, measured: Sequence[int]) -> list[float]:
    """Return the weight of each measured size in a value at `size`: linear between neighbours, constant beyond them."""
    above = bisect_left(measured, size)
    if above in (0, len(measured)):
        return [float(i == min(above, len(measured) - 1)) for i in range(len(measured))]
    share = (size - measured[above - 1]) / (measured[above] - measured[above - 1])
    return [{above - 1: 1 - share, above: share}.get(i, 0.0) for i in range(len(measured))]
