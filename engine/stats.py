"""Stats: counts of drafts and tokens that add up to the tokens emitted, and the time of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from engine.counts import Counts, total
from engine.pacing import Choice


@dataclass(frozen=True)
class RoundStats:
    """A round's wall time in seconds, how many rows were decoding, and how many tokens these emitted."""

    seconds: float
    busy: int
    emitted: int
    choice: Choice


@dataclass(frozen=True)
class Stats:
    """Counts of a run's rows, and the rounds of each replica in order; replicas decode at the same time. Prefill is
    timed apart; `draft_prefill_seconds` is the drafters' part of it."""

    rows: tuple[Counts, ...]
    replicas: tuple[tuple[RoundStats, ...], ...]
    prefill_seconds: float
    draft_prefill_seconds: float = 0.0

    @classmethod
    def joined(cls, each: Sequence[Stats]) -> Stats:
        """Join the stats of several replicas."""
        rows = tuple(chain.from_iterable(stats.rows for stats in each))
        replicas = tuple(chain.from_iterable(stats.replicas for stats in each))
        draft_prefill_seconds = max(stats.draft_prefill_seconds for stats in each)
        return cls(rows, replicas, max(stats.prefill_seconds for stats in each), draft_prefill_seconds)

    @property
    def counts(self) -> Counts:
        """The sum over rows."""
        return total(self.rows)

    @property
    def drafted(self) -> int:
        return self.counts.drafted

    @property
    def accepted(self) -> int:
        return self.counts.accepted

    @property
    def acceptance_per_position(self) -> list[float | None]:
        return self.counts.acceptance_per_position

    @property
    def rounds(self) -> tuple[RoundStats, ...]:
        """All rounds, replica after replica."""
        return tuple(chain.from_iterable(self.replicas))

    @property
    def decode_seconds(self) -> float:
        """The time of the replica that took longest."""
        return max((sum(r.seconds for r in rounds) for rounds in self.replicas), default=0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens per second over steady rounds, the sum over replicas; None without any."""
        steady = [_steady(rounds) for rounds in self.replicas if rounds]
        return sum(sum(r.emitted for r in rs) / sum(r.seconds for r in rs) for rs in steady) if steady else None

    def steady(self) -> list[RoundStats]:
        """Return the rounds in which as many rows of their replica were decoding as ever did."""
        return [r for rounds in self.replicas for r in _steady(rounds)]


def _steady(rounds: Sequence[RoundStats]) -> list[RoundStats]:
    most = max((r.busy for r in rounds), default=0)
    return [r for r in rounds if r.busy == most]
