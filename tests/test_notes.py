"""Remarks before a run, above its table and below: only where a reader would misread the numbers without them."""

from typing import Any

import pytest

from bench.config import RunConfig, Sizes, Target
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
