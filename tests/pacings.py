"""Pacings for tests."""

from collections.abc import Sequence

from engine.drafters import Drafter
from engine.pacing import Choice


class Scripted:
    """Choices in the order given, over and over."""

    def __init__(self, drafters: Sequence[Drafter], choices: Sequence[Choice]) -> None:
        self.drafters, self.max_gamma = tuple(drafters), max(choice.gamma for choice in choices)
        self._choices, self._n = tuple(choices), 0

    def choose(self, n_busy: int, n_joining: int) -> Choice | None:
        assert n_busy and n_joining >= 0
        self._n += 1
        return self._choices[self._n % len(self._choices)]

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        assert len(accepted) and all(0 <= n <= choice.gamma for n in accepted)


class Ending(Scripted):
    """The choices in the order given, interleaved, until there were so many rounds."""

    def __init__(self, drafters: Sequence[Drafter], choices: Sequence[Choice], n_rounds: int) -> None:
        super().__init__(drafters, choices[-1:] + choices[:-1])
        self._left = n_rounds

    def choose(self, n_busy: int, n_joining: int) -> Choice | None:
        self._left -= 1
        return super().choose(n_busy, n_joining) if self._left >= 0 else None
