"""Which drafter drafts how far in each round: always the same one, or whatever a pacing decides between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.drafters import Drafter


class Choice(NamedTuple):
    """One round: the index of its drafter and how many tokens are drafted a row; None and 0 is a plain step."""

    drafter: int | None
    gamma: int


PLAIN = Choice(None, 0)


class Pacing(Protocol):
    """What `generate` asks before and tells after every round. Where ranks share a model, all must choose alike."""

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those that a choice can name."""
        ...

    @property
    def max_gamma(self) -> int:
        """The largest gamma of any choice."""
        ...

    def choose(self) -> Choice: ...

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        """How many drafts of each decoding row were accepted in a round of that choice."""
        ...


class Fixed:
    """The same drafter with the same gamma in every round; plain decoding without one."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafters = () if drafter is None else (drafter,)
        self.max_gamma = 0 if drafter is None else drafter.gamma
        self._choice = PLAIN if drafter is None else Choice(0, drafter.gamma)

    def choose(self) -> Choice:
        return self._choice

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        return


class InTurn:
    """Every choice of a list in turn, over and over: what measures their costs beside each other."""

    def __init__(self, drafters: Sequence[Drafter], choices: Sequence[Choice]) -> None:
        self.drafters = tuple(drafters)
        self.max_gamma = max(choice.gamma for choice in choices)
        self._choices = tuple(choices)
        self._n_chosen = 0

    def choose(self) -> Choice:
        self._n_chosen += 1
        return self._choices[(self._n_chosen - 1) % len(self._choices)]

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        return
