"""What is said below the table of a run."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bench.notes import FEW_ROUNDS, notes
from engine.bench.resolved import ResolvedDraft
from engine.drafters.self_speculation import SelfConfig
from kv_cache.policy import BudgetedPolicy
from kv_cache.snapkv import SnapKV
from kv_cache.streaming import Streaming


def self_draft(
    gamma: int, policy: BudgetedPolicy, auto_gamma: bool = True, budgets: tuple[int, ...] = ()
) -> ResolvedDraft:
    return ResolvedDraft(SelfConfig(policy=policy), gamma, auto_gamma, policy.budget, budgets)


AUTO, NARROW = self_draft(6, Streaming()), self_draft(3, Streaming(8))


def record(*rounds_by_gamma: tuple[int, int], speedup: float | None = 1.2, gen_len: int = 64) -> dict[str, Any]:
    choices = [{"gamma": gamma, "rounds": rounds} for gamma, rounds in rounds_by_gamma]
    steady_rounds = sum(rounds for _, rounds in rounds_by_gamma)
    return {
        "gen_len": gen_len,
        "choices": choices,
        "speedup": speedup,
        "steady_rounds": steady_rounds,
        "measured_costs_seconds": None,
        "contention": {"baseline": beside(0.1), "speculation": beside(0.0, contended=None)},
    }


def beside(waiting: float, stolen: float = 0.0, contended: bool | None = False) -> dict[str, Any]:
    return {"cpu_share": 0.9, "threads_waiting": waiting, "stolen_processors": stolen, "contended": contended}


def test_a_run_with_a_result_says_nothing():
    assert notes(record((3, 20)), AUTO) == notes(record((0, 60), (3, 1)), AUTO) == []
    assert notes(record((3, 20)), self_draft(3, Streaming(), auto_gamma=False)) == []
    plain_decoding = {"gen_len": 64, "choices": None, "speedup": None, "steady_rounds": 63, "contention": {}}
    assert notes(plain_decoding, None) == []


def test_what_measuring_took_is_said():
    said = notes(record((0, 60), (3, 1)) | {"measured_costs_seconds": 11.26}, AUTO)
    assert said == ["measuring what rounds cost took 11.3 s, which is in no speedup"]


def test_a_speedup_of_plain_steps_or_of_few_rounds_is_noise():
    assert notes(record((0, 63)), AUTO) == ["every round was a plain step, so the speedups are noise"]
    assert notes(record((0, 63), speedup=None), AUTO) == ["every round was a plain step"]
    (few,) = notes(record((0, 1), (3, FEW_ROUNDS - 2)), AUTO)
    assert few.startswith(f"{FEW_ROUNDS - 1} rounds with all rows busy are too few")
    (unsteady,) = notes(record((3, 20)) | {"steady_rounds": 2}, AUTO)
    assert unsteady.startswith("2 rounds with all rows busy")
    assert notes(record((3, FEW_ROUNDS)), AUTO) == notes(record((3, 1), speedup=None), AUTO) == []


def test_drafts_of_no_tokens_are_asked_for():
    """With --gamma 0 the ratio is what the draft's cache costs."""
    for budgets in ((), (128, 512)):
        assert notes(record((0, 63)), self_draft(0, Streaming(), False, budgets)) == []


def test_one_token_is_not_decoded():
    for draft in (AUTO, NARROW):  # nothing was chosen, from however few
        (said,) = notes(record(speedup=None, gen_len=1), draft)
        assert "--gen_len 2" in said


@pytest.mark.parametrize(
    "draft,says",
    [
        (NARROW, "up to 3, not 6: streaming with a budget of 8 has room for 4 "),
        (self_draft(3, Streaming(64), budgets=(8, 64)), "a budget of 8 has room for 4 "),
        (self_draft(4, SnapKV(snapkv_window=5)), "snapkv with a budget of 512 has room for 5 "),
    ],
)
def test_a_gamma_that_was_chosen_among_few_says_why(draft, says):
    (said,) = notes(record((2, 20)), draft)
    assert says in said
    assert notes(record((2, 20)), self_draft(3, Streaming(8), auto_gamma=False)) == []


def test_a_busy_machine_is_named_with_the_passes_that_it_disturbed():
    busy = {
        "baseline": beside(3.0, 0.12, contended=True),
        "speculation": beside(0.1),
        "phase times": beside(0.5, 0, True),
    }
    (said,) = notes(record((3, 20)) | {"contention": busy}, AUTO)
    assert "3.1 during baseline, 0.5 during phase times" in said and "no time or speedup" in said
    plain_decoding = {"gen_len": 64, "choices": None, "contention": busy}
    assert notes(plain_decoding, None) == [said]
