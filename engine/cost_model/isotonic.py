"""Values that are known to fall, measured with noise."""

from __future__ import annotations

from collections.abc import Sequence


def non_increasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence that never grows and is nearest to the values, in weighted squares.

    Neighbours that grow get their weighted mean: pool adjacent violators (Ayer et al. 1955, Annals of Mathematical
    Statistics 26(4), 641-647).
    """
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        n = 1
        while pools and pools[-1][0] < value:
            before, weight_before, n_before = pools.pop()
            value = (before * weight_before + value * weight) / (weight_before + weight)
            weight, n = weight_before + weight, n_before + n
        pools.append((value, weight, n))
    return [value for value, _, n in pools for _ in range(n)]
