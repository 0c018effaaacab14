"""How often two ways to answer the same problems are right, and whether they differ: intervals and an exact test."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

# So many standard deviations of a normal distribution hold 95% of it.
Z = NormalDist().inv_cdf(0.975)
SIGNIFICANT = 0.05

Interval = tuple[float, float]


def wilson(right: int, n: int) -> Interval:
    """The 95% score interval of a rate of which `right` of `n >= 1` were seen: the rates r with
    |right / n - r| <= Z sqrt(r (1 - r) / n) (Wilson 1927, "Probable inference", JASA 22, 209-212).
    """
    centre, half = right + Z**2 / 2, Z * sqrt(right * (n - right) / n + Z**2 / 4)
    return max(0.0, (centre - half) / (n + Z**2)), min(1.0, (centre + half) / (n + Z**2))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of "either way is as often right", by the problems that only one of them solved: each
    falls to either side with probability 1/2 (McNemar 1947, Psychometrika 12, 153-157; the binomial is exact).
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n)


def paired_difference(only_first: int, only_second: int, n: int) -> Interval:
    """The 95% interval of the second rate less the first, of `n >= 1` problems: Wald's, with one problem more in each
    of the two cells (Bonett and Price 2012, J. Educational and Behavioral Statistics 37, 479-488).
    """
    first, second = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = Z * sqrt((first + second - (second - first) ** 2) / (n + 2))
    return max(-1.0, second - first - half), min(1.0, second - first + half)


def compared(plain: Sequence[bool], speculative: Sequence[bool]) -> dict[str, Any]:
    """Of the same problems, solved or not in plain decoding and in speculation: each rate with its interval, then the
    difference of the rates, and whether it is significant.
    """
    n, found = len(plain), dict[str, Any]()
    for name, solved in (("plain", plain), ("speculative", speculative)):
        found |= {f"{name}_right": sum(solved), f"{name}_success": sum(solved) / n}
        found |= {f"{name}_interval": wilson(sum(solved), n)}
    pairs = [*zip(plain, speculative, strict=True)]
    only_plain, only_speculative = pairs.count((True, False)), pairs.count((False, True))
    p_value = mcnemar(only_plain, only_speculative)
    return found | {
        "only_plain_right": only_plain,
        "only_speculative_right": only_speculative,
        "difference": (only_speculative - only_plain) / n,
        "difference_interval": paired_difference(only_plain, only_speculative, n),
        "mcnemar_p": p_value,
        "significant": p_value < SIGNIFICANT,
    }
