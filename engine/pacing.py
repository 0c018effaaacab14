"""Which drafter drafts how far in each round: always the same one, or whatever a pacing decides between rounds."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.acceptance import AcceptanceRate, verified_positions
from engine.drafters import Drafter


class Choice(NamedTuple):
    """One round: the index of its drafter and how many tokens are drafted a row; None and 0 is a plain step."""

    drafter: int | None
    gamma: int


PLAIN = Choice(None, 0)


class Pacing(Protocol):
    """What `generate` asks before and tells after every round. Where ranks share a model, all must choose alike.

    drafters: those that a choice can name. max_gamma: the largest of any choice.
    """

    drafters: tuple[Drafter, ...]
    max_gamma: int

    def choose(self) -> Choice | None:
        """What the next round is; None ends the decode, and every row keeps the tokens that it has."""

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        """How many drafts of each decoding row were accepted in a round of that choice."""


class Fixed:
    """The same drafter with the same gamma in every round; plain decoding without one."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafters: tuple[Drafter, ...] = () if drafter is None else (drafter,)
        self.max_gamma = 0 if drafter is None else drafter.gamma
        self._choice = PLAIN if drafter is None else Choice(0, drafter.gamma)

    def choose(self) -> Choice:
        return self._choice

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        return


class Interleaved:
    """The choices of a list, interleaved, until each had `n_rounds` rounds in which all `n_rows` rows decode.

    A decode ends before that once fewer rows do, behind one such round: after `restart` the next one goes on with what
    is missing.
    """

    def __init__(self, drafters: Sequence[Drafter], choices: Sequence[Choice], n_rows: int, n_rounds: int) -> None:
        self.drafters = tuple(drafters)
        self.max_gamma = max(choice.gamma for choice in choices)
        self.n_rounds, self.n_rows = n_rounds, n_rows
        self._rows_are_missing = False
        self._had = dict.fromkeys(choices, 0)
        self._verified, self._accepted = [0] * len(drafters), [0] * len(drafters)

    @property
    def done(self) -> bool:
        return min(self._had.values()) >= self.n_rounds

    def choose(self) -> Choice | None:
        if self.done or self._rows_are_missing:
            return None
        return min(self._had, key=self._had.__getitem__)

    def restart(self) -> None:
        """Another decode begins, with all rows."""
        self._rows_are_missing = False

    @property
    def acceptance(self) -> list[AcceptanceRate]:
        """What each drafter's rounds with all rows showed. ZeroDivisionError before every drafter had one."""
        pairs = zip(self._accepted, self._verified, strict=True)
        return [AcceptanceRate(accepted / verified, verified) for accepted, verified in pairs]

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        self._rows_are_missing = len(accepted) < self.n_rows
        if self._rows_are_missing:
            return
        self._had[choice] += 1
        if choice.drafter is not None:
            self._accepted[choice.drafter] += sum(accepted)
            self._verified[choice.drafter] += sum(verified_positions(choice.gamma, accepted))
