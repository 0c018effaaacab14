"""Intervals of acceptance, and of its difference between drafts of one text."""

import numpy as np
import pytest

from reproduce.helpers.pairs import interval, with_differences
from reproduce.helpers.records import Record


def row(accepted: list[int], verified: int = 60, **more: object) -> Record:
    by_row = [{"accepted": n, "verified": verified, "emitted": n, "rounds": 1} for n in accepted]
    return {"tokens_sha256": "a", "draft_budget": 64, "gamma": 3, "by_row": by_row, **more}


@pytest.mark.parametrize("n", [6, 20])
def test_intervals_cover_the_difference_of_drafts_of_like_rows(n: int):
    """Rows differ much, and two drafts of a row differ little: 95% of the intervals hold 0.05, few hold 0."""
    rng, held, zeros = np.random.default_rng(0), 0, 0
    for _ in range(80):
        alphas = rng.uniform(0.4, 0.9, n)
        better, worse = (rng.binomial(400, alphas + shift).tolist() for shift in (0.05, 0.0))
        found = interval(row(better, 400), row(worse, 400))
        assert found is not None
        held += found.low <= 0.05 <= found.high
        zeros += found.low <= 0 <= found.high
    assert 0.85 < held / 80 <= 1 and zeros < 20
    alone = interval(row(better, 400))
    assert alone is not None and alone.high - alone.low > 2 * (found.high - found.low), "unpaired"
    assert interval(row([0] * n, verified=0)) is None


def test_rows_are_compared_with_the_row_of_their_text_and_budget():
    base, wide = row([30, 35, 40, 45], drafter="self"), row([35, 40, 45, 50], drafter="self", draft_budget=128)
    better = row([36, 42, 47, 51], drafter="other", draft_budget=128)
    same, few = row([31, 34, 41, 44], drafter="other"), row([20, 20], drafter="other")
    others = [few, row([20] * 4, drafter="other", tokens_sha256="b"), {"drafter": "old"}]
    rows = with_differences([base, wide, better, same, *others], ["drafter=self"])
    differences = [each["difference"] for each in rows]
    assert differences[0] is differences[1] is None and differences[4:] == [None] * 3
    assert 0 < differences[2].value < 0.04 and str(differences[3]).startswith("no difference shown (-0.0")
    assert str(differences[2]).startswith("+0.0")
