"""Sentences about a run, before it, above its table and below."""

from typing import Any

import pytest

from bench.config import RunConfig, Sizes, Target
from bench.plan import resolve
from bench.record import nested
from bench.table import FEW_ROUNDS, notes
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming


def record(*rounds_by_gamma: tuple[int, int], **changes: Any) -> dict[str, Any]:
    choices = [{"gamma": gamma, "rounds": rounds} for gamma, rounds in rounds_by_gamma]
    steady = sum(rounds for _, rounds in rounds_by_gamma)
    return {
        "gen_len": 64,
        "gamma": "auto",
        "choices": choices,
        "speedup": 1.2,
        "steady_rounds": steady,
        "contention": {},
    } | changes


@pytest.mark.parametrize(
    "run,automatic,n_notes",
    [
        (record((0, 60), (3, 1)), ["gamma"], 0),
        (record((3, FEW_ROUNDS)), [], 0),
        (record((3, 1), speedup=None), ["gamma"], 0),
        (record((3, 20), measured_costs_seconds=11.26), ["gamma"], 1),
        (record((0, 63)), ["gamma"], 1),
        (record((3, FEW_ROUNDS - 1)), ["gamma"], 1),
        (record(gen_len=1), [], 1),
        (record((3, 20), contention={"baseline": {"contended": True}}), ["gamma"], 1),
        (record((3, 20), contention={"baseline": {"contended": None}}), ["gamma"], 0),
        (record((3, 20), wall_speedup=0.9), [], 1),
        (record((3, 20), wall_speedup=1.1), [], 0),
        (record((3, 20), distinct_4gram_fraction=0.2), ["gamma"], 1),
        (record((3, 20), distinct_4gram_fraction=0.9), ["gamma"], 0),
    ],
)
def test_notes_are_made_where_a_record_would_be_misread(run, automatic, n_notes):
    assert len(notes(run, automatic)) == n_notes


@pytest.mark.parametrize("gamma,gen_len,budget,n_remarks", [(4, 8, 207, 0), (4, 8, 208, 1), ("auto", 5, 16, 0)])
def test_remarks_are_made_where_a_plan_would_be_misread(gamma, gen_len, budget, n_remarks):
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    draft = SelfConfig(gamma=gamma, policy=Streaming(budget))
    assert len(resolve(RunConfig(target, draft=draft, sizes=Sizes(2, 200, gen_len))).remarks()) == n_remarks


def test_a_record_has_paths_from_the_checkout_on() -> None:
    record = nested(RunConfig(target=Target(compile=True)))["target"]
    assert record["model"].startswith("checkpoints/") and record["compile"] is True
