"""Costs of an earlier run: kept by what they depend on, used again after a check, and only where they still hold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.auto.costs import Costs
from bench.auto.measure import CHECKED_ROUNDS, measure_for_decode, still_hold
from bench.auto.rehearsal import Rehearsal
from bench.auto.saved_costs import load_costs, store_costs
from engine import SelfSpeculation
from engine.pacing import PLAIN, Choice
from engine.stats import AcceptanceRate
from tests.support.programs import overriding
from tests.support.tiny import full_cache, random_prompts, tiny_runner

SELFSPEC = "tests/selfspec_benchmark.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 30 --device cpu --dtype float64 --draft_budget 40 --gamma auto"
KEY = {"model": "a", "rows": 8, "layers": (1, 2)}
COSTS = {8: [Costs(100, (1, 3), (120, 150), 10, 2)], 2: [Costs(60, (3,), (70,), 9, 2)]}


@pytest.fixture(autouse=True)
def no_time_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a step that was held up is one whose share leaves time for more."""
    monkeypatch.setattr("bench.auto.measure.MOST_SHARE", 0.0)


def test_what_was_stored_is_found_by_its_key_alone():
    assert load_costs(KEY) is None
    with_rate = {n: [replace(one, acceptance=AcceptanceRate(0.9, 40)) for one in each] for n, each in COSTS.items()}
    store_costs(KEY, with_rate)
    assert load_costs(KEY) == COSTS
    for name, value in (("model", "b"), ("rows", 4), ("layers", (1,))):
        assert load_costs(KEY | {name: value}) is None


@pytest.mark.parametrize("text", ["", '{"key": 1}'])
def test_what_cannot_be_read_was_not_stored(costs_folder, text):
    store_costs(KEY, COSTS)
    (path,) = costs_folder.iterdir()
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert load_costs(KEY) is None


@pytest.mark.parametrize(
    "plain,round_,holds",
    [(300, 450, True), (100, 179, True), (100, 181, False), (100, 121, True), (100, 119, False)],
)
def test_costs_hold_where_a_round_is_as_many_plain_steps_as_before(monkeypatch, plain, round_, holds):
    """A round of gamma 3 took 1.82 plain steps; costs on a machine three times as slow are three times those."""
    ms = {PLAIN: plain, Choice(0, 3): round_ * 1.82 / 1.5}

    def run(self: Rehearsal, choices: Any, n_rounds: int) -> None:
        assert n_rounds == CHECKED_ROUNDS
        for choice in choices:  # the first one was held up
            now = ms[choice] / 1e3
            held_up, usual = {"draft": 9e9, "verify": now}, {"draft": now / 4, "verify": now * 3 / 4}
            self.timed[choice] += [{"resume": 0.0} | held_up, {"resume": 0.5} | usual]
        self._verified[0], self._accepted[0] = 10, 7

    monkeypatch.setattr(Rehearsal, "run", run)
    runner = tiny_runner(2)
    drafter = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=6)
    known = {8: [Costs(100, (1, 3, 6), (120, 150, 190), 10, 1, fixed_ms=1)], 2: COSTS[2]}
    found = still_hold(known, Rehearsal(runner, [drafter], random_prompts([9, 12]), gamma=6, max_new_tokens=9))
    assert (found is not None) == holds
    if found:
        assert [found[8][0].round_ms(6), found[2][0].plain_ms] == pytest.approx([252 * plain / 100, 60 * plain / 100])
        assert found[8][0].acceptance == AcceptanceRate(0.7, 10)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that costs were measured."""
    times: list[int] = []

    def counted(rehearsal: Rehearsal, gammas: Sequence[int], n_steps: int) -> Any:
        times.append(n_steps)
        return measure_for_decode(rehearsal, gammas, n_steps)

    monkeypatch.setattr("bench.auto.run_costs.measure_for_decode", counted)
    return times


def hold(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr("bench.auto.run_costs.still_hold", lambda known, rehearsal: known if found else None)


def test_a_second_run_measures_nothing(call, costs_folder, measured, monkeypatch):
    monkeypatch.setattr("bench.auto.measure.MOST_OFF", float("inf"))
    first, second = (call(SELFSPEC, SIZES) for _ in range(2))
    assert measured == [30] and len([*costs_folder.iterdir()]) == 1
    assert [run.record["measured_costs_kept"] for run in (first, second)] == [False, True]
    assert "checking the costs of an earlier run took" in second.out
    kept = [run.record["measured_costs"] for run in (first, second)]
    ratios = [[one["draft_ms"] / one["plain_ms"] for one in costs] for costs in kept]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-2) and second.record["identical_sequences"] == 2


@pytest.mark.parametrize("flags", ["--measure_costs", "--B 1", "--prefix_len 90"])
def test_costs_are_measured_anew_for_another_run_or_on_demand(call, measured, monkeypatch, flags):
    hold(monkeypatch, True)
    runs = [call(SELFSPEC, " ".join(overriding(SIZES, more))) for more in ("", flags)]
    assert runs[1].record["measured_costs_kept"] is False and len(measured) == 2


def test_costs_that_do_not_hold_are_measured_anew_and_kept(call, measured, monkeypatch):
    call(SELFSPEC, SIZES)
    hold(monkeypatch, False)
    again = call(SELFSPEC, SIZES).record
    hold(monkeypatch, True)
    third = call(SELFSPEC, SIZES).record
    assert len(measured) == 2 and third["measured_costs"][0]["plain_ms"] == again["measured_costs"][0]["plain_ms"]
