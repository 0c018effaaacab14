"""Stats: counts of drafts and tokens that add up to the tokens emitted, acceptance rates, and times of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple


class RoundChoice(NamedTuple):
    """The index of a round's drafter, and the number of tokens that it drafts a row; None and 0 for a plain step."""

    drafter: int | None
    gamma: int


PLAIN = RoundChoice(None, 0)
# Rows below which their spread says little of a standard error.
LEAST_ROWS = 4


@dataclass
class Counts:
    """Drafts and tokens of a row, or sums over rows.

    A position is *verified* when all drafts before it were accepted and its outcome was emitted; drafts after a
    rejection, a stop token or a limit are not. `emitted` leaves out a row's first token, which its prefill gives.
    """

    rounds: int = 0
    drafted: int = 0
    emitted: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @classmethod
    def of_gamma(cls, gamma: int) -> Counts:
        return cls(verified_at=[0] * gamma, accepted_at=[0] * gamma)

    def add_round(self, drafted: int, accepted: int, emitted: int, n_before: int = 0) -> RowRound:
        """Count a row's block, of whose `accepted` drafts and the target's token `emitted` tokens were kept, and return
        it."""
        part = RowRound(n_before, drafted, min(emitted, drafted), min(accepted, emitted), emitted)
        self.rounds += 1
        self.drafted += drafted
        self.emitted += emitted
        for position in range(part.verified):
            self.verified_at[position] += 1
        for position in range(part.accepted):
            self.accepted_at[position] += 1
        return part

    @property
    def verified(self) -> int:
        return sum(self.verified_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """The accepted share of the verified positions: the alpha of Leviathan et al. 2023."""
        return self.accepted / self.verified if self.verified else None

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """Acceptance rate of the i-th draft of a block, given that all drafts before it were accepted."""
        pairs = zip(self.accepted_at, self.verified_at, strict=True)
        return [accepted / verified if verified else None for accepted, verified in pairs]

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per row and round, the recovered or bonus token included."""
        return self.emitted / self.rounds if self.rounds else None


def total(counts: Sequence[Counts]) -> Counts:
    """Return the sum over rows, which all have the same gamma."""
    verified_at = zip(*(row.verified_at for row in counts), strict=True)
    accepted_at = zip(*(row.accepted_at for row in counts), strict=True)
    return Counts(
        sum(row.rounds for row in counts),
        sum(row.drafted for row in counts),
        sum(row.emitted for row in counts),
        [*map(sum, verified_at)],
        [*map(sum, accepted_at)],
    )


def counts_by_row(rows: Iterable[Counts]) -> list[dict[str, int]]:
    """Return the counts of each row, by which drafts that decoded one text are compared in pairs."""
    names = "rounds", "drafted", "verified", "accepted", "emitted"
    return [{name: getattr(row, name) for name in names} for row in rows]


def acceptance_standard_error(rows: Sequence[Counts]) -> float | None:
    """Return the standard error of the acceptance rate of all rows together; None unless four rows verified drafts.

    Drafts of one text depend on each other, so the rows are the sample (clusters).
    """
    return ratio_standard_error([(row.accepted, row.verified) for row in rows if row.verified])


def ratio_standard_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the standard error of the ratio R = sum(x) / sum(y) over a sample of n pairs (x, y), `sqrt(n / (n - 1) *
    sum((x - R * y)**2)) / sum(y)` (Cochran 1977, Sampling Techniques, chapter 6); None for fewer than LEAST_ROWS."""
    if len(pairs) < LEAST_ROWS:
        return None
    total_x, total_y = map(sum, zip(*pairs, strict=True))
    squares = sum((x - total_x / total_y * y) ** 2 for x, y in pairs)
    return math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / total_y


def acceptance_text(record: Mapping[str, Any]) -> str | None:
    """Return the acceptance rate, with its standard error if that is known: `0.812 ± 0.013`. None without a rate."""
    return with_error(record.get("acceptance_rate"), record.get("acceptance_standard_error"), 3)


def with_error(value: float | None, error: float | None, digits: int) -> str | None:
    """Return a value with its standard error, if that is known; None without a value."""
    if value is None:
        return None
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def verified_positions(gamma: int, accepted: Sequence[int]) -> list[int]:
    """Return how many draft positions of each row's block count as verified: those of the accepted drafts and of the
    first rejection, even if the drafter had no token to propose there, since a round's yield is what counts."""
    return [min(n_accepted + 1, gamma) for n_accepted in accepted]


@dataclass(frozen=True)
class AcceptanceRate:
    """The share of `n` verified draft positions that was accepted."""

    value: float
    n: float


class RowRound(NamedTuple):
    """A row's part in a round: tokens that it had generated before, its drafts and tokens as `Counts` has them, and the
    id of its request."""

    n_before: int
    drafted: int
    verified: int
    accepted: int
    emitted: int
    request: int = 0


@dataclass(frozen=True)
class RoundStats:
    """A round's wall time in seconds, how many rows were decoding, how many tokens they emitted, and their parts."""

    seconds: float
    busy: int
    emitted: int
    choice: RoundChoice
    rows: tuple[RowRound, ...] = ()


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
    def acceptance_rate(self) -> float | None:
        return self.counts.acceptance_rate

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
