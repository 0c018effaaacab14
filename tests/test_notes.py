<<<<<<< HEAD
"""Remarks before a run, above its table and below: only where a reader would misread the numbers without them."""
=======
"""Sentences about a run, before it, above its table and below."""
>>>>>>> refs/heads/bench

from typing import Any

import pytest

from bench.config import RunConfig, Sizes, Target
<<<<<<< HEAD
from bench.finish import FEW_ROUNDS, notes
from bench.plan import remarks, resolve
from bench.resolved import ResolvedDraft
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming

DRAFT = ResolvedDraft(SelfConfig(policy=Streaming()), 6, True, Streaming().budget, ())


def beside(waiting: float, stolen: float = 0.0, contended: bool | None = False) -> dict[str, Any]:
    return {"threads_waiting": waiting, "stolen_processors": stolen, "contended": contended}


def record(*rounds_by_gamma: tuple[int, int], **changes: Any) -> dict[str, Any]:
    return {
        "gen_len": 64,
        "choices": [{"gamma": gamma, "rounds": rounds} for gamma, rounds in rounds_by_gamma],
        "speedup": 1.2,
        "wall_speedup": 1.18,
        "steady_rounds": sum(rounds for _, rounds in rounds_by_gamma),
        "measured_costs_seconds": None,
        "measured_costs_kept": None,
        "held_up_rounds": None,
        "contention": {"baseline": beside(0.1), "speculation": beside(0.0)},
        **changes,
    }


BUSY = {"baseline": beside(3.0, 0.12, True), "speculation": beside(0.1)}


@pytest.mark.parametrize(
    "run,word",
    [
        (record((3, 20)), None),
        (record((3, FEW_ROUNDS)), None),
        (record((3, FEW_ROUNDS - 1)), f"{FEW_ROUNDS - 1}"),
        (record((0, 63)), "plain"),
        (record((3, 20), measured_costs_seconds=11.26), "11.3 s"),
        (record((3, 20), steady_rounds=14, wall_speedup=1.1), "6 of 20"),
        (record((3, 20), held_up_rounds=4), "4 rounds"),
        (record((3, 20), contention=BUSY), "baseline"),
        (record(speedup=None, gen_len=1), "--gen_len"),
    ],
)
def test_a_run_has_the_notes_that_it_needs(run, word):
    found = notes(run, DRAFT)
    assert len(found) == (word is not None) and (word is None or word in found[0])


@pytest.mark.parametrize(
    "gamma,gen_len,budget,word", [(4, 8, 207, None), (4, 8, 208, "whole context"), (5, 5, 16, "at most 4")]
)
def test_a_plan_has_the_remarks_that_it_needs(gamma, gen_len, budget, word):
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    draft = SelfConfig(gamma=gamma, policy=Streaming(budget))
    found = remarks(resolve(RunConfig(target, draft=draft, sizes=Sizes(2, 200, gen_len))))
    assert len(found) == (word is not None) and (word is None or word in found[0])
=======
from bench.plan import DraftPlan, remarks, resolve
from bench.table import FEW_ROUNDS, headline, notes
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming


def draft_of(gamma: int, auto_gamma: bool = True) -> DraftPlan:
    return DraftPlan(SelfConfig(policy=Streaming()), gamma, auto_gamma)


def record(*rounds_by_gamma: tuple[int, int], **changes: Any) -> dict[str, Any]:
    choices = [{"gamma": gamma, "rounds": rounds} for gamma, rounds in rounds_by_gamma]
    steady = sum(rounds for _, rounds in rounds_by_gamma)
    return {"gen_len": 64, "choices": choices, "speedup": 1.2, "steady_rounds": steady, "contention": {}} | changes


@pytest.mark.parametrize(
    "run,draft,n_notes",
    [
        (record((3, 20)), draft_of(6), 0),
        (record((0, 60), (3, 1)), draft_of(6), 0),
        (record((3, FEW_ROUNDS)), draft_of(3, False), 0),
        (record((3, 1), speedup=None), draft_of(6), 0),
        (record((0, 63)), draft_of(0, False), 0),
        (record((3, 20), measured_costs_seconds=11.26, measured_costs_kept=False), draft_of(6), 1),
        (record((0, 63)), draft_of(6), 1),
        (record((3, FEW_ROUNDS - 1)), draft_of(6), 1),
        (record(gen_len=1), None, 1),
        (record((3, 20), contention={"baseline": {"contended": True}}), draft_of(6), 1),
        (record((3, 20), contention={"baseline": {"contended": None}}), draft_of(6), 0),
    ],
)
def test_notes_are_made_where_a_record_would_be_misread(run, draft, n_notes):
    assert len(notes(run, draft)) == n_notes


@pytest.mark.parametrize("gamma,gen_len,budget,n_remarks", [(4, 8, 207, 0), (4, 8, 208, 1), ("auto", 5, 16, 0)])
def test_remarks_are_made_where_a_plan_would_be_misread(gamma, gen_len, budget, n_remarks):
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    draft = SelfConfig(gamma=gamma, policy=Streaming(budget))
    assert len(remarks(resolve(RunConfig(target, draft=draft, sizes=Sizes(2, 200, gen_len))))) == n_remarks


@pytest.mark.parametrize("gamma", [0, 3])
def test_the_headline_names_a_draft_that_drafts(gamma):
    plan = SimpleNamespace(config=RunConfig(), n_rows=1, draft=draft_of(gamma), gen_len=8)
    session: Any = SimpleNamespace(plan=plan, ranks=SimpleNamespace(size=1))
    results = {"model": "M", "device": "cpu", "dtype": "float32", "verification": "greedy", "temperature": 0}
    said = headline(session, results | {"prefill_seconds": 0.1}, [60])
    assert ("self draft" in said) == (gamma > 0)
>>>>>>> refs/heads/bench
