"""Tables for the console, the standard error of acceptance rates in them, and passes that other work held up."""

from dataclasses import replace

import numpy as np
import pytest

from common.contention import QUIET, Usage, contention
from common.tables import Column, console
from engine.stats import Counts, acceptance_standard_error, total

COLUMNS = [
    Column("model", "model", align="<"),
    Column("speedup", "speedup", ".2f"),
    Column(lambda row: row["B"] * 2, "twice", lambda value: f"{value} rows", missing="none"),
    Column("alpha", "a|b", ".0%", missing="not measured"),
]
ROWS = [{"model": "M", "speedup": 1.256, "B": 4, "alpha": 0.5}, {"model": "longer", "speedup": None, "B": 16}]


def test_on_the_console_columns_are_as_wide_as_what_is_in_them():
    assert console(ROWS, COLUMNS).splitlines() == [
        "  model   speedup    twice           a|b",
        "  M          1.26   8 rows           50%",
        "  longer        -  32 rows  not measured",
    ]


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
