"""Speculative decoding == the plain reference, token for token, over random scenarios (KV witness)."""

from __future__ import annotations

import os

import pytest
from scenarios import run_scenario
from witness import WitnessModel, continue_plainly

SCENARIOS = int(os.environ.get("WITNESS_SCENARIOS", "600"))
BATCHES = 40


class WitnessWorld:
    model = WitnessModel()
    continue_plainly = staticmethod(continue_plainly)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_speculation_equals_the_reference(batch: int, record_property) -> None:
    seeds = range(batch, SCENARIOS, BATCHES)
    for seed in seeds:
        run_scenario(WitnessWorld(), seed)
    record_property("count: witness scenarios without a mismatch", len(seeds))
