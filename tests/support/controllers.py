"""Controllers, schedules and a clock for tests."""

from collections.abc import Sequence

import torch

from engine.controller import RoundChoice
from engine.drafters import Drafter
from engine.drafters.schedules import Confidence, Heuristic, Schedule

# Makers of a schedule from gamma and a number of rows; "" drafts gamma tokens. Thresholds are near what tiny models
# are sure of.
SCHEDULES = {
    "": lambda gamma, n_rows: Schedule(),
    "heuristic": lambda gamma, n_rows: Heuristic(gamma, n_rows, torch.device("cpu")),
    "confidence": lambda gamma, n_rows: Confidence(0.5, 0.0, n_rows, torch.device("cpu")),
    "confidence, p_min": lambda gamma, n_rows: Confidence(0.3, 0.4, n_rows, torch.device("cpu")),
    "confidence, auto": lambda gamma, n_rows: Confidence("auto", 0.0, n_rows, torch.device("cpu")),
}


def scheduled(drafter: Drafter, schedule: str, n_rows: int) -> Drafter:
    """Give the drafter a new schedule of that name, and return it."""
    drafter.schedule = SCHEDULES[schedule](drafter.gamma, n_rows)
    if drafter.parts:  # a drafter made of others has the schedule of the main one
        drafter.parts[0].schedule = drafter.schedule
    return drafter


class Scripted:
    """A controller that makes its choices in the order given, over and over."""

    def __init__(self, drafters: Sequence[Drafter], choices: Sequence[RoundChoice]) -> None:
        self.drafters, self.max_gamma = tuple(drafters), max(choice.gamma for choice in choices)
        self._choices, self._n = tuple(choices), 0

    def choose(self, n_busy: int, n_joining: int, context: float) -> RoundChoice | None:
        assert n_busy and n_joining >= 0 and context >= 1
        self._n += 1
        return self._choices[self._n % len(self._choices)]

    def observe(self, choice: RoundChoice, accepted: Sequence[int]) -> None:
        assert len(accepted) and all(0 <= n <= choice.gamma for n in accepted)


class Clock:
    """A stand-in for `time` that moves on when it is read or waited for; in seconds."""

    def __init__(self, tick: float = 1e-3) -> None:
        self.tick, self.now = tick, 0.0

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
