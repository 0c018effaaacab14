"""The standard error of acceptance rates, and passes that other work held up."""

from dataclasses import replace

import numpy as np
import pytest

from common.contention import QUIET, Usage, contention
from engine.stats import Counts, acceptance_standard_error, total


def rows_that_differ(n: int, rng: np.random.Generator) -> list[Counts]:
    """Rows of 5 to 60 verified drafts, each with a probability of its own that one is accepted."""
    verified, alphas = rng.integers(5, 61, n), rng.beta(4, 2, n)
    accepted = rng.binomial(verified, alphas)
    pairs = zip(verified.tolist(), accepted.tolist(), strict=True)
    return [Counts(verified_at=[of], accepted_at=[taken]) for of, taken in pairs]


def test_the_standard_error_is_the_spread_of_repeated_samples():
    """Drafts of a row are alike: as if all drafts were independent, the spread would be less than half of it."""
    rng = np.random.default_rng(2)
    samples = [rows_that_differ(25, rng) for _ in range(500)]
    rates = [total(rows).acceptance_rate for rows in samples]
    mean_error = np.mean([acceptance_standard_error(rows) for rows in samples])
    sums = [total(rows) for rows in samples]
    independent = np.mean([np.sqrt(s.acceptance_rate * (1 - s.acceptance_rate) / s.verified) for s in sums])
    assert mean_error == pytest.approx(np.std(rates), rel=0.1) and independent < mean_error / 2


CALM = Usage(seconds=10.0, waits={"7": 0.3}, stolen=0.1)


@pytest.mark.parametrize("what", [{"waits": {"7": 10 * QUIET + 1}}, {"stolen": 10 * QUIET + 1}])
def test_threads_that_waited_and_processors_that_were_stolen_are_other_work(what):
    assert contention([CALM])["contended"] is False
    assert contention([replace(CALM, **what)])["contended"] is True
