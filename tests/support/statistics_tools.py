"""Chi-square and total variation, without scipy."""

import torch
from torch import Tensor

FEWEST = 5.0  # cells that expect fewer counts are pooled into one


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return the statistic of `counts` against `expected`, of equal totals and any shapes, and its degrees of freedom;
    infinite if what cannot happen did. They add up over samples."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    assert abs(float(counts.sum() - expected.sum())) < 1e-6 * float(counts.sum()), "the totals differ"
    if bool((counts[expected <= 0] > 0).any()):
        return float("inf"), 1
    small = expected < FEWEST
    pooled = torch.stack([expected[small].sum(), counts[small].sum()])
    wanted, seen = expected[~small], counts[~small]
    if float(pooled[0]) > 0:
        wanted, seen = torch.cat([wanted, pooled[:1]]), torch.cat([seen, pooled[1:]])
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def upper_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square with that many degrees of freedom."""
    if statistic == float("inf"):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def total_variation(counts: Tensor, expected: Tensor) -> float:
    """Half the L1 distance between the two laws."""
    return float((counts.double() / counts.sum() - expected / expected.sum()).abs().sum() / 2)
