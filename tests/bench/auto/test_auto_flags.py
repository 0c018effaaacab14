"""`auto` and SnapKV on the benchmarks' command lines: what was chosen, and why."""

from dataclasses import replace
from typing import Any

import pytest

from bench.auto.costs import Costs
from bench.auto.measure import measure_costs

SELFSPEC, LONGSPEC = "tests/selfspec_benchmark.py", "tests/longspec_benchmark.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 30 --device cpu --dtype float64"
SNAPKV = "--draft_policy snapkv --draft_budget 40"


@pytest.fixture
def drafting_pays(monkeypatch: pytest.MonkeyPatch):
    """Whatever is measured, the smallest budget drafts for nothing, and a verification costs what a step does."""

    def cheap(*args: Any, **kwargs: Any) -> dict[int, list[Costs]]:
        (n_rows, measured), *_ = measure_costs(*args, **kwargs).items()
        n_gammas = len(measured[0].at)
        cheapest = replace(measured[-1], plain_ms=100.0, verify_ms=(100.0,) * n_gammas, draft_ms=0.1, other_ms=0.0)
        return {n_rows: [*(replace(cheapest, draft_ms=90.0) for _ in measured[1:]), cheapest]}

    monkeypatch.setattr("bench.auto.measure.measure_costs", cheap)


def drafting(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of rounds that drafted."""
    return [choice for choice in record["choices"] if choice["gamma"]]


@pytest.mark.parametrize("flags", ["--gamma auto", "--gamma auto --draft_policy snapkv --snapkv_window 12"])
def test_gamma_auto_says_what_it_chose_and_why(call, drafting_pays, flags):
    record = call(SELFSPEC, f"{SIZES} --draft_budget 40 {flags} --benchmark").record
    assert record["gamma"] == "auto" and record["identical_sequences"] == 2
    assert sum(choice["rounds"] for choice in record["choices"]) >= 5
    assert all(0 <= choice["gamma"] <= 6 for choice in record["choices"])
    assert drafting(record) and all(choice["draft_budget"] == 40 for choice in drafting(record))
    (costs,) = record["measured_costs"]
    assert record["measured_costs_seconds"] > 0
    assert (costs["rows"], costs["gammas"]) == (2, [1, 3, 6]) and costs["plain_ms"] > 0
    assert costs["draft_budget"] == 40 and 0 <= costs["accepted_share"] <= 1 and costs["verified"] > 0


def test_the_budget_is_chosen_among_those_that_leave_something_out(call, drafting_pays):
    """Budgets 64, 128, ... count only below the prompt's length, or the smallest: a prompt of 60 leaves 64."""
    record = call(SELFSPEC, f"{SIZES} --draft_budget auto --gamma 2").record
    assert record["draft_budget"] == "auto" and record["gamma"] == 2 and record["identical_sequences"] == 2
    assert {choice["draft_budget"] for choice in drafting(record)} == {64}
    assert len(record["measured_costs"]) == 1
    longer = "--B 2 --prefix_len 150 --gen_len 40 --device cpu --dtype float64"
    record = call(SELFSPEC, f"{longer} --draft_budget auto --gamma auto").record
    assert {choice["draft_budget"] for choice in drafting(record)} == {64}  # 128 would cost too much
    assert [costs["draft_budget"] for costs in record["measured_costs"]] == [128, 64]
    assert record["identical_sequences"] == 2


def test_the_policy_is_chosen_too_and_choosing_entries_is_counted(call, drafting_pays):
    """Every policy is measured with each budget that a prompt of 150 leaves; here the last costs nothing."""
    longer = "--B 2 --prefix_len 150 --gen_len 40 --device cpu --dtype float64 --draft_policy auto --refresh 2"
    names = ["streaming", "retrieval", "snapkv", "verify_topk"]
    for flags, budgets in (("--draft_budget 50", [50]), ("--draft_budget auto --gamma auto", [128, 64])):
        seen = call(SELFSPEC, f"{longer} --snapkv_window 12 {flags}")
        record = seen.record
        assert (record["draft_policy"], record["identical_sequences"]) == ("auto", 2)
        assert record["draft_budget"] == (50 if budgets == [50] else "auto")
        costs = [(one["draft_budget"], one["draft_policy"]) for one in record["measured_costs"]]
        assert costs == [(budget, name) for budget in budgets for name in names]
        assert {(one["draft_policy"], one["draft_budget"]) for one in drafting(record)} == {(names[-1], budgets[-1])}
        assert "x verify_topk, " in seen.out


@pytest.mark.parametrize(
    "drafter", ["--draft ngram", "--draft oracle", "--draft_policy full", SNAPKV, f"{SNAPKV} --target"]
)
def test_every_drafter_takes_an_automatic_gamma(call, checkpoint, drafting_pays, drafter):
    script, given = (LONGSPEC, f"{drafter} {checkpoint}") if drafter.endswith("--target") else (SELFSPEC, drafter)
    record = call(script, f"{SIZES} --gamma auto {given}").record
    assert record["identical_sequences"] == 2 and record["gamma"] == "auto" and drafting(record)
