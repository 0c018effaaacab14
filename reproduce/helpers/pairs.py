"""Intervals of rates, and of differences between drafts that decoded one text, by a bootstrap over rows."""

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from engine.stats import LEAST_ROWS
from reproduce.helpers.records import Record, parse_condition

# Each rate is a ratio of sums over rows.
RATES = {"acceptance_rate": ("accepted", "verified"), "mean_accepted_length": ("emitted", "rounds")}
CONFIDENCE, N_SAMPLE, SEED = 0.95, 5000, 0


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the value and its interval, or that no difference is shown if the interval holds zero."""
        value = "no difference shown" if self.low <= 0 <= self.high else f"{self.value:+.3f}"
        return f"{value} ({self.low:+.3f} to {self.high:+.3f})"


def interval(row: Record, other: Record | None = None, name: str = "acceptance_rate") -> Interval | None:
    """Return the 95% interval of a row's rate, or of its difference from that of `other`, which decoded the same text;
    None for fewer than four rows of text, and where nothing was verified.

    Texts are drawn with replacement, the same ones for both. The percentiles are those of Hesterberg's expanded
    interval (arXiv 1411.5279), which makes up for few texts by a t distribution in the place of the normal one.
    """
    counts = [
        np.array([[text[part] for part in RATES[name]] for text in each.get("by_row") or ()])
        for each in (row, other)
        if each is not None
    ]
    n = len(counts[0])
    if n < LEAST_ROWS or any(len(each) != n or not each[:, 1].any() for each in counts):
        return None
    drawn = np.vstack([np.arange(n), np.random.default_rng(SEED).integers(n, size=(N_SAMPLE, n))])
    with np.errstate(invalid="ignore"):  # NaN of texts in which nothing was verified
        rates, *others = (np.divide(*each[drawn].sum(axis=1).T) for each in counts)
    value, *samples = rates - sum(others)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * _t(n - 1))
    low, high = np.nanquantile(samples, [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))


def _t(freedom: int) -> float:
    """Return the quantile of Student's t distribution, by Cornish and Fisher's expansion about the normal one."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def with_differences(rows: Sequence[Record], against: Iterable[str]) -> list[Record]:
    """Return the rows with the `difference` of their acceptance from that of a row that decoded the same text and
    fulfils the conditions `against`, with the same budget and gamma if there is one."""
    conditions, found = [*map(parse_condition, against)], []
    bases = [row for row in rows if all(row.get(name) in values for name, values in conditions)]
    for row in rows:
        pairs = [base for base in bases if not _n_unlike(base, row, "tokens_sha256", "generated")]
        pairs = pairs if row.get("tokens_sha256") else []
        base = min(pairs, key=lambda base: _n_unlike(base, row, "draft_budget", "gamma"), default=None)
        found.append(row | {"difference": None if base in (None, row) else interval(row, base)})
    return found


def _n_unlike(base: Record, row: Record, *names: str) -> int:
    """Return how many of these fields differ."""
    return sum(base.get(name) != row.get(name) for name in names)
