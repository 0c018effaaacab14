"""What is said of passes that did not have the processors to themselves; clocks and counters are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine import contention as module
from engine.contention import LEAST_SECONDS, QUIET_PROCESSORS, Usage, contention, usage_so_far

QUIET = Usage("here", threads=2, seconds=10.0, own=19.0, everyone=19.5, stolen=0.1)


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(module.psutil, "cpu_count", lambda logical=True: 8 if logical else 4)


def seen(*ranks: Usage, on_cpu: bool = True) -> dict:
    return contention(ranks, on_cpu)


def test_usage_is_what_was_counted_in_between(monkeypatch):
    counted = {"user": 50.0, "nice": 1.0, "system": 5.0, "irq": 0.5, "softirq": 0.5, "steal": 3.0, "idle": 900.0}
    counted |= {"iowait": 7.0, "guest": 2.0}  # idle, and in `user` already
    clocks = {"perf_counter": 100.0, "process_time": 20.0}
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: SimpleNamespace(**counted))
    monkeypatch.setattr(module, "time", SimpleNamespace(**{name: lambda n=name: clocks[n] for name in clocks}))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    before = usage_so_far()
    counted |= {"user": 68.0, "idle": 950.0, "steal": 4.0, "softirq": 1.0}
    clocks |= {"perf_counter": 110.0, "process_time": 36.0}
    between = usage_so_far().since(before)
    assert replace(between, host="") == Usage("", threads=2, seconds=10.0, own=16.0, everyone=18.5, stolen=1.0)
    expected = {"cpu_share": 0.8, "other_processors": 0.25, "stolen_processors": 0.1}
    assert {name: seen(between)[name] for name in expected} == pytest.approx(expected)


def test_a_system_without_steal_has_none(monkeypatch):
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: SimpleNamespace(user=1.0, nice=0.0, system=1.0, idle=5.0))
    assert (usage_so_far().everyone, usage_so_far().stolen) == (2.0, 0.0)


def test_others_count_where_they_take_what_the_threads_need():
    full = replace(QUIET, threads=4, own=38.0)
    assert seen(replace(full, everyone=38.5))["contended"] is False
    assert seen(replace(full, everyone=38.0 + 10 * QUIET_PROCESSORS + 1))["contended"] is True
    assert seen(replace(full, everyone=38.0, stolen=10 * QUIET_PROCESSORS + 1))["contended"] is True
    too_many = replace(full, threads=16)
    assert seen(too_many)["contended"] is False, "what is of our own doing is no other work"
    # Two of four processors are left to others.
    assert seen(replace(QUIET, everyone=19.0 + 20.0))["contended"] is False
    assert seen(replace(QUIET, everyone=19.0 + 25.0))["contended"] is True


def test_no_verdict_on_a_short_pass():
    short = replace(QUIET, seconds=0.9 * LEAST_SECONDS, everyone=40.0)
    assert seen(short)["contended"] is None and seen(short)["other_processors"] > 4


def test_of_a_pass_on_a_gpu_only_what_others_did_is_told():
    of_gpu = seen(replace(QUIET, own=1.0, everyone=40.0, stolen=2.0), on_cpu=False)
    expected = {"cpu_share": None, "other_processors": 3.9, "stolen_processors": 0.2, "contended": None}
    assert of_gpu == pytest.approx(expected)


def test_ranks_are_not_each_others_load_and_the_worst_one_counts():
    two = [replace(QUIET, own=18.0, everyone=37.5), replace(QUIET, own=19.0, everyone=37.5)]
    assert seen(*two) == {
        "cpu_share": pytest.approx(0.9),
        "other_processors": pytest.approx(0.05),
        "stolen_processors": pytest.approx(0.01),
        "contended": False,
    }
    elsewhere = replace(QUIET, host="there", own=12.0, everyone=42.0, stolen=1.0)
    both = seen(QUIET, elsewhere)
    assert both["cpu_share"] == pytest.approx(0.6) and both["other_processors"] == pytest.approx(3.0)
    assert both["contended"] is True and seen(QUIET)["contended"] is False
