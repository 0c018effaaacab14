"""Acceptance rates: how many drafts were accepted of those that could be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def verified_positions(gamma: int, accepted: Sequence[int]) -> list[int]:
    """Of each row's block, how many draft positions were verified: the accepted ones and the first rejected one, also
    where the drafter had nothing to propose for it: what rounds yield counts, whoever is to blame."""
    return [min(n_accepted + 1, gamma) for n_accepted in accepted]


@dataclass(frozen=True)
class AcceptanceRate:
    """The accepted share of n verified draft positions."""

    value: float
    n: float

    @property
    def standard_error(self) -> float:
        """`sqrt(a (1 - a) / n)` of independent drafts, with one accepted and one rejected more than there were, without
        which a few drafts that were all accepted, or none, would seem certain (Agresti and Caffo 2000, The American
        Statistician 54(4), 280-288). Drafts of one block, and blocks of one text, are not independent: this is a lower
        bound."""
        share = (self.value * self.n + 1) / (self.n + 2)
        return math.sqrt(share * (1 - share) / (self.n + 2))
