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

    A round of three rows counts three times in `rounds`. The other sums are those of steady rounds, in which as many
    rows decoded as ever did: `row_rounds` of them, their `seconds` and those of `phases`, a round's once for each row,
    and the tokens that they `emitted`.
    """

    rounds: int = 0
    verified: int = 0
    accepted: int = 0
    kept: int = 0
    row_rounds: int = 0
    emitted: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, other: Stretch) -> None:
        for name in ("rounds", "verified", "accepted", "kept", "row_rounds", "emitted", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, seconds in other.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds

    @property
    def tokens_per_row_second(self) -> float | None:
        return self.emitted / self.seconds if self.seconds else None

    def mean_ms(self, phase: str | None = None) -> float | None:
        """Return the mean ms of a round, or of a phase in it."""
        seconds = self.seconds if phase is None else self.phases.get(phase)
        return 1e3 * seconds / self.row_rounds if seconds is not None and self.row_rounds else None


class ByLength(Progress):
    """Sums of a pass by stretches of `width` generated tokens. shown: gets all callbacks, too."""

    def __init__(self, width: int, shown: Progress, timer: PhaseTimer | None = None) -> None:
        self.width, self._shown, self._timer = width, shown, timer
        self.stretches: dict[int, Stretch] = {}
        self._of_round: list[tuple[Stretch, int]] = []
        self._most_busy, self._n_timed = 0, dict[str, int]()

    def prefilled(self, n_tokens: int) -> None:
        self._shown.prefilled(n_tokens)

    def emitted(self, n_tokens: int) -> None:
        self._shown.emitted(n_tokens)

    def finished(self, request: Request) -> None:
        self._shown.finished(request)

    def decoded(self, request: Request, outcome: Outcome, n_kept: int) -> None:
        self._shown.decoded(request, outcome, n_kept)
        stretch = self.stretches.setdefault((len(request.tokens) - n_kept) // self.width, Stretch())
        stretch.rounds += 1
        stretch.kept += n_kept
        stretch.accepted += min(len(outcome.block) - 1, n_kept)
        stretch.verified += min(n_kept, len(outcome.drafts))
        self._of_round.append((stretch, n_kept))

    def ended(self, round_: RoundStats) -> None:
        """Add a steady round's times to the stretches of its rows."""
        self._shown.ended(round_)
        phases = self._phases()
        self._most_busy = max(self._most_busy, round_.busy)
        if round_.busy == self._most_busy:
            for stretch, n_kept in self._of_round:
                stretch.add(Stretch(row_rounds=1, emitted=n_kept, seconds=round_.seconds, phases=phases))
        self._of_round.clear()

    def _phases(self) -> dict[str, float]:
        """Return the seconds of each phase since the last round."""
        times = self._timer.seconds if self._timer else {}
        new = {name: sum(each[self._n_timed.get(name, 0) :]) for name, each in times.items()}
        self._n_timed = {name: len(each) for name, each in times.items()}
        return new


def by_length_rows(width: int, gen_len: int, passes: Mapping[str, Mapping[int, Stretch]]) -> list[dict[str, Any]]:
    """Return a row for each stretch that speculation reached, of the stretches of each pass; None where nothing is
    known."""
    speculation = passes["speculation"]
    rows: list[dict[str, Any]] = []
    for index, stretch in sorted(speculation.items()):
        plain, phases = (passes.get(name, {}).get(index, Stretch()) for name in ("baseline", "phase times"))
        speed, plain_speed = stretch.tokens_per_row_second, plain.tokens_per_row_second
        rows.append(
            {
                "generated": [index * width, min((index + 1) * width, gen_len)],
                "rounds": stretch.rounds,
                "verified": stretch.verified,
                "acceptance_rate": stretch.accepted / stretch.verified if stretch.verified else None,
                "mean_accepted_length": stretch.kept / stretch.rounds,
                "baseline_step_ms": plain.mean_ms(),
                "round_ms": stretch.mean_ms(),
                "draft_ms": phases.mean_ms("draft"),
                "verify_ms": phases.mean_ms("verify"),
                "speedup": speed / plain_speed if speed and plain_speed else None,
            }
        )
    return rows
