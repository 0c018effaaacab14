"""Costs of an earlier run: kept by what they depend on, used again after a check, and only where they still hold."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from tiny import full_cache, random_prompts, tiny_model

from engine import ModelRunner, SelfSpeculation
from engine.acceptance import AcceptanceRate
from engine.cost_model.costs import Costs
from engine.cost_model.measure import CHECKED_ROUNDS, measure_for_decode, still_hold
from engine.cost_model.rehearsal import Rehearsal
from engine.cost_model.stored import load_costs, store_costs
from engine.pacing import PLAIN, Choice

SELFSPEC = "tests/selfspec_benchmark.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 30 --device cpu --dtype float64 --draft_budget 40 --gamma auto"
KEY = {"model": "a", "rows": 8, "layers": (1, 2)}
COSTS = {8: [Costs(100, (1, 3), (120, 150), 10, 2)], 2: [Costs(60, (3,), (70,), 9, 2)]}


def test_what_was_stored_is_found_by_its_key_alone():
    assert load_costs(KEY) is None
    with_rate = {n: [replace(one, acceptance=AcceptanceRate(0.9, 40)) for one in each] for n, each in COSTS.items()}
    store_costs(KEY, with_rate)
    assert load_costs(KEY) == COSTS
    for name, value in (("model", "b"), ("rows", 4), ("layers", (1,))):
        assert load_costs(KEY | {name: value}) is None


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', '{"costs": {}}', "\udcff"])
def test_what_cannot_be_read_was_not_stored(costs_folder, text):
    store_costs(KEY, COSTS)
    (path,) = costs_folder.iterdir()
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert load_costs(KEY) is None


def test_costs_of_another_key_with_the_same_digest_are_not_used(costs_folder):
    store_costs(KEY, COSTS)
    (path,) = costs_folder.iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"key": KEY | {"rows": 4}}))
    assert load_costs(KEY) is None


def test_a_folder_that_cannot_be_written_stores_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("engine.cost_model.stored.cache_folder", lambda: tmp_path / "file")
    store_costs(KEY, COSTS)
    assert load_costs(KEY) is None


@pytest.mark.parametrize(
    "plain,round_,holds",
    [
        (1, 1.32, True),
        (3, 3.96, True),
        (1, 1.57, True),
        (1, 1.60, False),
        (1, 1.07, True),
        (1, 1.04, False),
        (2, 1.32, False),
    ],
)
def test_costs_hold_where_a_round_is_as_many_plain_steps_as_before(monkeypatch, plain, round_, holds):
    """One of gamma 1 took 132 ms, 1.32 times a plain step."""
    ms = {PLAIN: plain, Choice(0, 1): round_}

    def run(self: Rehearsal, choices: Any, n_rounds: int) -> None:
        assert n_rounds == CHECKED_ROUNDS
        for choice in choices:  # the first one was held up
            self.timed[choice] += [
                {"draft": 9e9, "verify": ms[choice]},
                {"draft": ms[choice] / 4, "verify": ms[choice] * 3 / 4},
            ]
        self._verified[0], self._accepted[0] = 10, 7

    monkeypatch.setattr(Rehearsal, "run", run)
    model = tiny_model()
    runner = ModelRunner(model, full_cache(model, 2))
    drafter = SelfSpeculation(runner, full_cache(model, 2), gamma=3)
    found = still_hold(COSTS[8], runner, [drafter], random_prompts([9, 12]), max_new_tokens=9)
    assert found == ([replace(COSTS[8][0], acceptance=AcceptanceRate(0.7, 10))] if holds else None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that costs were measured."""
    times: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(kwargs["n_steps"])
        return measure_for_decode(*args, **kwargs)

    monkeypatch.setattr("engine.bench.auto_costs.measure_for_decode", counted)
    return times


def hold(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr("engine.bench.auto_costs.still_hold", lambda known, *args, **how: known if found else None)


def test_a_second_run_measures_nothing(call, costs_folder, measured, monkeypatch):
    hold(monkeypatch, True)
    first, second = (call(SELFSPEC, SIZES) for _ in range(2))
    assert measured == [30] and len([*costs_folder.iterdir()]) == 1
    assert [run.record["measured_costs_kept"] for run in (first, second)] == [False, True]
    assert "checking the costs of an earlier run took" in second.out
    kept = [
        [one | {"accepted_share": 0, "places_reached": 0} for one in run.record["measured_costs"]]
        for run in (first, second)
    ]
    assert kept[0] == kept[1] and second.record["identical_sequences"] == 2


@pytest.mark.parametrize(
    "flags", ["--measure_costs", "--B 1", "--prefix_len 90", "--dtype float32", "--kv_dtype int8", "--draft_budget 30"]
)
def test_costs_are_measured_anew_for_another_run_or_where_that_is_asked_for(call, measured, monkeypatch, flags):
    hold(monkeypatch, True)
    call(SELFSPEC, SIZES)
    words = [SIZES, flags] if flags == "--measure_costs" else [without(flags.split()[0]), flags]
    assert call(SELFSPEC, " ".join(words)).record["measured_costs_kept"] is False and len(measured) == 2


def without(name: str) -> str:
    words = shlex.split(SIZES)
    return " ".join(words[: words.index(name)] + words[words.index(name) + 2 :]) if name in words else SIZES


def test_costs_that_do_not_hold_are_measured_anew_and_kept(call, measured, monkeypatch):
    call(SELFSPEC, SIZES)
    hold(monkeypatch, False)
    again = call(SELFSPEC, SIZES).record
    hold(monkeypatch, True)
    third = call(SELFSPEC, SIZES).record
    assert len(measured) == 2 and third["measured_costs"][0]["plain_ms"] == again["measured_costs"][0]["plain_ms"]
