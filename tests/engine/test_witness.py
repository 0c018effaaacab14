"""Speculative decoding == the plain reference, token for token, over random scenarios (KV witness)."""

import os

import pytest

from tests.support.scenarios import REFERENCED, WitnessWorld, run_scenario, run_scenarios

SCENARIOS = int(os.environ.get("WITNESS_SCENARIOS", "120"))
BATCHES = 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_speculation_equals_the_reference(batch: int, record_property) -> None:
    run_scenarios(WitnessWorld(), range(batch, SCENARIOS, BATCHES), "witness", record_property)


@pytest.mark.parametrize("drafter", REFERENCED)
def test_rejection_draws_what_the_reference_draws(drafter: str) -> None:
    for seed in range(8):
        run_scenario(WitnessWorld(), seed, drafter)
