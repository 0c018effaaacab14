"""What the roofline predicts of published numbers."""

from dataclasses import replace
from statistics import median

import pytest

from bench.auto.costs import tokens_per_round
from cost_model.machines import find_machine
from cost_model.roofline import predict_costs
from models.presets import preset_config
from reproduce.helpers import published as facts
from reproduce.helpers.published import GAMMAS, alpha_of, is_acceptance_known, predict, published_speedups

KNOWN = [fact for fact in published_speedups() if is_acceptance_known(fact)]


def test_the_acceptance_of_a_context_is_the_published_one_or_lies_between_its_neighbours():
    assert alpha_of({"prefix_len": 8000}) == 0.83 and alpha_of({"prefix_len": 1024}) == 0.84
    assert alpha_of({"prefix_len": 24000}) == pytest.approx(0.815)
    assert len(KNOWN) == 22 and {fact["model"] for fact in KNOWN} == {"Llama-3.1-8B"}


def test_predictions_are_near_what_was_published(monkeypatch):
    errors = [abs(predict(fact) / fact["value"] - 1) for fact in KNOWN]
    assert median(errors) < 0.1
    losses = [predict(fact) for fact in KNOWN if fact["prefix_len"] == 4000]
    assert len(losses) == 4 and max(losses) < 1  # as published
    monkeypatch.setattr(facts, "FLASH_ATTENTION_2", {"tile": 16, "packs_group": True})
    assert median(abs(predict(fact) / fact["value"] - 1) for fact in KNOWN) > 2 * median(errors)


def test_a_speedup_is_that_of_its_gamma_or_the_best_where_none_is_named():
    fact = {"model": "Llama-3.1-8B", "draft_model": None, "origin": "8xA100", "prefix_len": 32000, "B": 64, "gamma": 2}
    fact |= {"draft_budget": 512}
    llama = facts.ModelStorage(preset_config("meta-llama/Meta-Llama-3.1-8B"))
    machine = replace(find_machine("8xA100"), tile=64, packs_group=False)
    costs = predict_costs(llama, llama, machine, 64, 32000, 512, GAMMAS)
    by_hand = {gamma: costs.speedup(tokens_per_round(0.81, gamma), gamma) for gamma in GAMMAS}
    assert predict(fact) == by_hand[2] and predict(fact | {"gamma": None}) == max(by_hand.values())
    assert predict(fact | {"origin": "8xH100"}) != by_hand[2]
