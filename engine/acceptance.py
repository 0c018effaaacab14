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
    """The accepted share of so many judged drafts; `judged` is None for a rate that was given, not measured."""

    value: float
    judged: float | None = None

    @property
    def standard_error(self) -> float:
        """`sqrt(a (1 - a) / n)`, that of n independent drafts; 0 for a rate that was given.

        Drafts of one block, and blocks of one text, are not independent: this is a lower bound. Where all drafts were
        accepted, or none, it is 0 and says nothing.
        """
        return math.sqrt(self.value * (1 - self.value) / self.judged) if self.judged else 0.0

    def tokens_error(self, gamma: int) -> float:
        """How far one standard error moves `tokens_per_round`, to first order."""
        slope = sum(place * self.value ** (place - 1) for place in range(1, gamma + 1))
        return self.standard_error * slope
