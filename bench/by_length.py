"""Acceptance, costs and speedup by the number of tokens that a row has generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.requests import Outcome, Progress, Request
from engine.stats import RoundStats
from engine.timing import PhaseTimer


@dataclass
class Stretch:
    """Sums over the rounds of all rows while they were between two numbers of generated tokens.

    rounds: a round of three rows counts three times. seconds: a round's time is shared among the rows that decode in
    it. round_seconds, phases: whole rounds' and phases' times, a sum over `rounds`.
    """

    rounds: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    seconds: float = 0.0
    round_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        return self.emitted / self.seconds if self.seconds else None

    def mean_ms(self, phase: str | None = None) -> float | None:
        """Return the mean ms of a round, or of a phase in it."""
        seconds = self.round_seconds if phase is None else self.phases.get(phase)
        return 1e3 * seconds / self.rounds if seconds is not None and self.rounds else None


class ByLength(Progress):
    """Sums of a pass by stretches of `width` generated tokens, of one replica. shown: gets all callbacks, too."""

    def __init__(self, width: int, shown: Progress, timer: PhaseTimer | None = None) -> None:
        self.width, self._shown, self._timer = width, shown, timer
        self.stretches: dict[int, Stretch] = {}
        self._of_round: list[Stretch] = []
        self._n_timed: dict[str, int] = {}

    def prefilled(self, n_tokens: int) -> None:
        self._shown.prefilled(n_tokens)

    def emitted(self, n_tokens: int) -> None:
        self._shown.emitted(n_tokens)

    def finished(self, request: Request) -> None:
        self._shown.finished(request)

    def decoded(self, request: Request, outcome: Outcome, n_kept: int) -> None:
        self._shown.decoded(request, outcome, n_kept)
        stretch = self.stretches.setdefault((len(request.tokens) - n_kept) // self.width, Stretch())
        n_accepted = min(len(outcome.block) - 1, n_kept)
        stretch.rounds += 1
        stretch.emitted += n_kept
        stretch.accepted += n_accepted
        stretch.verified += min(n_kept, len(outcome.drafts))
        self._of_round.append(stretch)

    def ended(self, round_: RoundStats) -> None:
        """Add a round's times to the stretches of the rows that decoded in it."""
        phases = self._phases() if self._timer else {}
        for stretch in self._of_round:
            stretch.seconds += round_.seconds / len(self._of_round)
            stretch.round_seconds += round_.seconds
            for name, seconds in phases.items():
                stretch.phases[name] = stretch.phases.get(name, 0.0) + seconds
        self._of_round.clear()

    def _phases(self) -> dict[str, float]:
        """Return the seconds of each phase since the last round."""
        assert self._timer is not None
        new = {name: sum(times[self._n_timed.get(name, 0) :]) for name, times in self._timer.seconds.items()}
        self._n_timed = {name: len(times) for name, times in self._timer.seconds.items()}
        return new


def by_length_rows(width: int, passes: Mapping[str, ByLength]) -> list[dict[str, Any]]:
    """Return a row for each stretch that speculation reached, from the passes by name; None where nothing is known."""
    speculation = passes["speculation"].stretches
    baseline, timed = (passes[name].stretches if name in passes else {} for name in ("baseline", "phase times"))
    rows: list[dict[str, Any]] = []
    for index, stretch in sorted(speculation.items()):
        plain, phases = baseline.get(index, Stretch()), timed.get(index, Stretch())
        speed, plain_speed = stretch.tokens_per_second, plain.tokens_per_second
        rows.append(
            {
                "generated": [index * width, (index + 1) * width],
                "rounds": stretch.rounds,
                "verified": stretch.verified,
                "acceptance_rate": stretch.accepted / stretch.verified if stretch.verified else None,
                "mean_accepted_length": stretch.emitted / stretch.rounds,
                "baseline_step_ms": plain.mean_ms(),
                "round_ms": stretch.mean_ms(),
                "draft_ms": phases.mean_ms("draft"),
                "verify_ms": phases.mean_ms("verify"),
                "baseline_tokens_per_second": plain_speed,
                "tokens_per_second": speed,
                "speedup": speed / plain_speed if speed and plain_speed else None,
            }
        )
    return rows
