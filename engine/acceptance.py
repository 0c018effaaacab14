"""Acceptance rates: how many drafts were accepted of those that could be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def places_reached(gamma: int, accepted: Sequence[int]) -> list[int]:
    """Of each row's block: the accepted places and the first rejected one. A place is reached if all before it were
    accepted, also where the drafter had nothing to propose for it: its yield counts, whoever is to blame.
    """
    return [min(n_accepted + 1, gamma) for n_accepted in accepted]


@dataclass(frozen=True)
class AcceptanceRate:
    """The accepted share of n judged drafts, or of n places of blocks that were reached; n is None if it was given."""

    value: float
    n: float | None = None

    @property
    def standard_error(self) -> float:
        """`sqrt(a (1 - a) / n)` of independent drafts, with one accepted and one rejected more than there were; 0 for a
        rate that was given.

        Without those two, a few drafts that were all accepted, or none, would seem certain. That many in each of two
        samples make an interval of their difference good (Agresti and Caffo 2000, The American Statistician 54(4),
        280-288). Drafts of one block, and blocks of one text, are not independent: this is a lower bound.
        """
        if self.n is None:
            return 0.0
        share = (self.value * self.n + 1) / (self.n + 2)
        return math.sqrt(share * (1 - share) / (self.n + 2))

    def tokens_error(self, gamma: int) -> float:
        """How far one standard error moves `tokens_per_round`, to first order."""
        slope = sum(place * self.value ** (place - 1) for place in range(1, gamma + 1))
        return self.standard_error * slope


# What was counted of drafters of the same kind is worth so many places to each of them: a beta prior whose spread, 0.07
# at a rate of 0.85, is about that of the budgets 64 to 512 in docs/speculation.md.
KIN_PLACES = 24.0


def drawn_together(rates: Sequence[AcceptanceRate | None]) -> list[AcceptanceRate | None]:
    """Each counted rate with up to KIN_PLACES places of the others' mean, in which none has a larger say than that.

    The best of several rates that were counted over few places is mostly the luckiest. That is shrinkage towards the
    others' mean (Efron and Morris 1975, Journal of the American Statistical Association 70(350), 311-319), by a given
    amount. Rates that were given (n is None) or not seen (None) stay, and are not counted.
    """
    says = [0.0 if one is None or one.n is None else min(one.n, KIN_PLACES) for one in rates]

    def drawn(index: int, own: AcceptanceRate | None) -> AcceptanceRate | None:
        n_others = sum(says) - says[index]
        if own is None or own.n is None or not n_others:
            return own
        others = sum(
            say * one.value for at, (say, one) in enumerate(zip(says, rates, strict=True)) if one and at != index
        )
        n_kin = min(KIN_PLACES, n_others)
        n = own.n + n_kin
        return AcceptanceRate((own.value * own.n + others / n_others * n_kin) / n, n)

    return [drawn(index, own) for index, own in enumerate(rates)]
