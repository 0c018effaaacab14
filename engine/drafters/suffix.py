"""Suffix: drafts what followed the row's longest suffix that stood in its text before, of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.drafters.base import Guess, HostDrafter, Shown
from engine.drafters.config import HostDrafterConfig, Parts

if TYPE_CHECKING:
    from engine.runner import ModelRunner


# How many of the suffixes that end at a token are noted to have ended there.
N_NOTED = 16


class SuffixAutomaton:
    """Of a growing text, every substring (Blumer et al. 1985): a state is substrings that end at the same positions,
    the longest of `_length` tokens, and its link their longest suffix that ends elsewhere, too. Amortised O(1) a token.

    repeated: how long the text's longest suffix is that occurs in it before, and how many tokens the text had where that
    last ended, or earlier where more suffixes than N_NOTED end with it; 0 and 0 without one.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.repeated = 0, 0
        self._next: list[dict[int, int]] = []
        self._length: list[int] = []
        self._link: list[int] = []
        self._end: list[int] = []
        self._last = self._state({}, 0, 0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)
            state = self._link[self._last]
            self.repeated = self._length[state], self._end[state]
            for _ in range(N_NOTED):
                if state == 0:
                    break
                self._end[state], state = len(self.text), self._link[state]

    def _state(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def _append(self, token: int) -> None:
        self.text.append(token)
        place, self._last = self._last, self._state({}, len(self.text), 0, len(self.text))
        while token not in self._next[place]:
            self._next[place][token] = self._last
            if place == 0:
                return
            place = self._link[place]
        found = self._next[place][token]
        if self._length[found] > self._length[place] + 1:  # its shorter substrings end here, too: a state of their own
            longer, own = found, (dict(self._next[found]), self._length[place] + 1, self._link[found], self._end[found])
            self._link[longer] = found = self._state(*own)
            while self._next[place].get(token) == longer:
                self._next[place][token] = found
                if place == 0:
                    break
                place = self._link[place]
        self._link[self._last] = found


class Suffix(HostDrafter):
    """It copies from where the suffix stood last; at the end of the text, from the beginning of what it copied.

    Errors: ConfigError if gamma is negative.
    """

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        super().__init__(runner, gamma)
        self._rows: dict[int, SuffixAutomaton] = {}

    def continued(self, shown: Shown) -> Guess:
        if shown.known == 0:
            self._rows[shown.row] = SuffixAutomaton()
        own = self._rows[shown.row]
        own.extend(shown.text[len(own.text) :])
        (n_matched, end), n_text = own.repeated, len(own.text)
        return Guess([own.text[end + i % (n_text - end)] for i in range(self.gamma)] if n_matched else (), n_matched)


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(HostDrafterConfig):
    """Copies from the row's own text, behind the longest match of any length."""

    name: ClassVar[str] = "suffix"

    def build(self, parts: Parts) -> Suffix:
        return Suffix(parts.runner, parts.gamma)
