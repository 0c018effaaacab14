"""Passes whose threads waited for processors count as contended; clocks and counters are made up."""

from dataclasses import replace

import pytest

from common.contention import QUIET, Usage, contention

CALM = Usage(seconds=10.0, waits={"7": 0.3}, stolen=0.1)


@pytest.mark.parametrize("what", [{"waits": {"7": 10 * QUIET + 1}}, {"stolen": 10 * QUIET + 1}])
def test_threads_that_waited_and_processors_that_were_stolen_are_other_work(what):
    assert contention([CALM])["contended"] is False
    assert contention([replace(CALM, **what)])["contended"] is True
