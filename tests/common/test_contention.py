"""Passes whose threads waited for processors count as contended; clocks and counters are made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from common import contention as module
from common.contention import QUIET, WAKING, Usage, contention, usage_so_far

CALM = Usage(seconds=10.0, waits={"7": 0.3}, stolen=0.1)


def test_usage_is_what_was_counted_in_between(monkeypatch, tmp_path):
    """Two threads were there all along, and a third came."""
    clock, steal = {"seconds": 100.0}, {"steal": 3.0}

    def count(thread: str, waited: int, n: int) -> None:
        (tmp_path / thread).mkdir(exist_ok=True)
        (tmp_path / thread / "schedstat").write_text(f"123 {waited} {n}\n")

    count("7", 10**9, 10)
    count("8", 2 * 10**9, 10)
    waiting = module._waits
    monkeypatch.setattr(module, "_waits", lambda: waiting(tmp_path))
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: SimpleNamespace(**steal))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock["seconds"]))
    before = usage_so_far()
    clock["seconds"], steal["steal"] = 110.0, 4.0
    count("8", 4 * 10**9, 50)
    count("9", 10**9, 960)
    between = usage_so_far().since(before)
    waits = {"7": 0.0, "8": 2.0 - 40 * WAKING, "9": 1.0 - 960 * WAKING}
    assert between.waits == pytest.approx(waits)
    assert replace(between, waits={}) == Usage(seconds=10.0, waits={}, stolen=1.0)
    expected = {"threads_waiting": 0.25, "stolen_processors": 0.1, "contended": True}
    assert contention([between]) == pytest.approx(expected)


@pytest.mark.parametrize("what", [{"waits": {"7": 10 * QUIET + 1}}, {"stolen": 10 * QUIET + 1}])
def test_threads_that_waited_and_processors_that_were_stolen_are_other_work(what):
    assert contention([CALM])["contended"] is False
    assert contention([replace(CALM, **what)])["contended"] is True
