"""Success rates of two ways to answer the same problems: intervals, and an exact test of their difference."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

# 95% of a normal distribution lies within Z standard deviations.
Z = NormalDist().inv_cdf(0.975)
SIGNIFICANT = 0.05


def wilson(right: int, n: int) -> tuple[float, float]:
    """Return the 95% score interval of a rate after `right` successes in `n >= 1` trials: the rates r with
    |right / n - r| <= Z sqrt(r (1 - r) / n) (Wilson 1927, "Probable inference", JASA 22, 209-212)."""
    centre, half = right + Z**2 / 2, Z * sqrt(right * (n - right) / n + Z**2 / 4)
    return max(0.0, (centre - half) / (n + Z**2)), min(1.0, (centre + half) / (n + Z**2))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided exact p-value of equal success rates, by the problems that only the first or only the second
    way solved: each is either with probability 1/2 (McNemar 1947, Psychometrika 12, 153-157; the binomial is exact)."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n)


def paired_difference(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of the second rate less the first over `n >= 1` problems: Wald's, with a problem added to
    each of the two counts (Bonett and Price 2012, J. Educational and Behavioral Statistics 37, 479-488)."""
    first, second = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = Z * sqrt((first + second - (second - first) ** 2) / (n + 2))
    return max(-1.0, second - first - half), min(1.0, second - first + half)


def compared(plain: Sequence[bool], speculative: Sequence[bool]) -> dict[str, Any]:
    """Return both success rates and their difference, by which problems plain decoding and speculation solved."""
    n, pairs, found = len(plain), [*zip(plain, speculative, strict=True)], dict[str, Any]()
    for way, right in (("plain", sum(plain)), ("speculative", sum(speculative))):
        found |= {way: {"right": right, "success": right / n, "interval": wilson(right, n)}}
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    found |= {"only_plain_right": lost, "only_speculative_right": won, "difference": (won - lost) / n}
    found |= {"difference_interval": paired_difference(lost, won, n), "mcnemar_p": mcnemar(lost, won)}
    return found | {"significant": found["mcnemar_p"] < SIGNIFICANT}
