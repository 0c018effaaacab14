"""Controller: chooses the drafter and gamma of each round; `Fixed` never changes them."""

from collections.abc import Sequence
from typing import Protocol

from engine.drafters import Drafter
from engine.stats import PLAIN, RoundChoice


class Controller(Protocol):
    """Chooses before every round and observes after it. Ranks that share a model have to choose alike.

    drafters: all that a choice can name. max_gamma: the largest gamma of any choice.
    """

    drafters: tuple[Drafter, ...]
    max_gamma: int

    def choose(self, n_busy: int, n_joining: int, context: float) -> RoundChoice | None:
        """Return the next round's choice. `n_busy` rows decode, after `context` tokens on average, and `n_joining`
        more are about to. None ends the decode, and every row keeps the tokens that it has."""

    def observe(self, choice: RoundChoice, accepted: Sequence[int]) -> None:
        """Learn how many drafts of each decoding row were accepted in a round of that choice."""


class Fixed:
    """Chooses the same drafter with its gamma in every round; plain decoding without a drafter."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafters: tuple[Drafter, ...] = () if drafter is None else (drafter,)
        self.max_gamma = 0 if drafter is None else drafter.gamma
        self._choice = PLAIN if drafter is None else RoundChoice(0, drafter.gamma)

    def choose(self, n_busy: int, n_joining: int, context: float) -> RoundChoice:
        return self._choice

    def observe(self, choice: RoundChoice, accepted: Sequence[int]) -> None:
        return
