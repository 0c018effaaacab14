"""Published speedups and the roofline: what is fitted to what, what is assumed, and what the script says of it."""

import json
from dataclasses import replace
from functools import partial

import pytest
from programs import run
from published_runs import ORIGIN, write

from bench.auto.costs import Costs, tokens_per_round
from cost_model.grid import CostGrid
from cost_model.machines import find_machine
from cost_model.roofline import ModelStorage, predict_costs
from models.presets import preset_config
from reproduce import published_page, roofline_error
from reproduce.paper import cpu_roofline, predicted
from reproduce.paper.predicted import alpha_of, halves, machine_of, predict
from reproduce.paper.published import published, same_context, target_name
from reproduce.roofline_error import STATED, fit, fitted, median_error, scaled

KNOWN = [fact for fact in published().speedups if predicted.is_acceptance_known(fact)]


def setting(fact):
    return "8xH100" in fact["origin"], fact["prefix_len"], fact["B"]


def test_what_is_assumed_stands_apart_from_what_was_published():
    groups = roofline_error.groups()
    assert [len(facts) for facts in groups.values()] == [11, 11, 55]
    assert {target_name(fact) for fact in KNOWN} == {"Llama-3.1-8B"} and len(KNOWN) == 22
    for fact in KNOWN:
        near = [one for one in published().acceptance if same_context(one["prefix_len"], fact["prefix_len"])]
        assert [alpha_of(fact)] == [one["value"] for one in near]
    by_context = {fact["prefix_len"]: alpha_of(fact) for fact in groups["assumed acceptance"]}
    assert by_context[24000] == pytest.approx(0.815) and by_context[1024] == 0.84


def test_no_setting_is_in_both_halves():
    fitted, held_back = halves(KNOWN)
    assert not set(map(setting, fitted)) & set(map(setting, held_back))
    assert len(fitted) + len(held_back) == len(KNOWN)
    assert any("8xH100" in fact["origin"] for fact in held_back)


def test_what_is_held_back_moves_no_constant(monkeypatch):
    before = fit(halves(KNOWN)[0])
    others = [fact | {"value": 9.0} for fact in halves(KNOWN)[1]]
    moved = {**published().__dict__, "speedup_tables": [*halves(KNOWN)[0], *others], "figure_6": []}
    monkeypatch.setattr(roofline_error, "published", lambda: type(published())(**moved))
    fitted.cache_clear()
    assert fitted() == before
    fitted.cache_clear()


def test_a_fit_finds_the_constants_that_made_the_numbers():
    true = 0.8, 0.2
    facts = [fact | {"value": predict(fact, scaled(true, machine_of(fact)))} for fact in KNOWN]
    assert fit(facts) == true


def test_predictions_are_as_near_as_is_said():
    is_read_once = partial(replace, tile=16, packs_group=True)
    assert median_error(KNOWN, partial(scaled, STATED)) <= 0.15 < median_error(KNOWN, is_read_once)
    assert median_error(halves(KNOWN)[1], partial(scaled, fitted())) <= 0.08
    losses = {fact["B"]: predict(fact) for fact in KNOWN if fact["prefix_len"] == 4000}
    assert len(losses) == 4 and max(losses.values()) < 1  # as published


def test_a_speedup_is_that_of_its_gamma_or_the_best_where_none_is_named():
    fact = {"model": "Llama-3.1-8B", "draft_model": None, "origin": "8xA100", "prefix_len": 32000, "B": 64, "gamma": 2}
    fact |= {"draft_budget": 512}
    llama, machine = ModelStorage(preset_config("meta-llama/Meta-Llama-3.1-8B")), find_machine("8xA100")
    machine = replace(machine, tile=64, packs_group=False)
    costs = predict_costs(llama, llama, machine, 64, 32000, 512, predicted.GAMMAS)
    by_hand = {gamma: costs.speedup(tokens_per_round(0.81, gamma), gamma) for gamma in predicted.GAMMAS}
    assert predict(fact) == by_hand[2]
    assert predict(fact | {"gamma": None}) == max(by_hand.values())
    assert predict(fact | {"origin": "8xH100"}) != by_hand[2]


def test_the_script_says_how_far_off_predictions_are(tmp_path):
    files = ["--output", str(tmp_path / "out.jsonl"), "--figures", str(tmp_path)]
    ended = run("reproduce/roofline_error.py", files)
    record = ended.record
    assert record["benchmark"] == "roofline_error" and len(record["rows"]) == 77 and "off by 6.0%" in ended.out
    assert json.loads((tmp_path / "out.jsonl").read_text()) == record
    assert {row["group"] for row in record["rows"]} == set(roofline_error.groups())
    assert (tmp_path / "roofline_error.svg").is_file() and (tmp_path / "roofline_error.png").is_file()
    for row in record["rows"]:
        assert row.keys() >= {"published", "predicted", "fitted"} and "measured" not in row


def test_the_page_has_a_prediction_beside_every_published_number(tmp_path):
    text = published_page.page(tmp_path, tmp_path)
    head = "\n".join(text.splitlines()[:10])
    assert "*Measured*" in head and "*Predicted*" in head and "off by 6.0%" in head
    assert "not measured where both could be compared" in head
    facts = published()
    rows = [
        line
        for line in text.partition("## Measured here")[0].splitlines()
        if line.startswith(("| L", "| verif", "| draft step"))
    ]
    with_error = [row for row in rows if "%) |" in row]
    assert len(with_error) == len(facts.speedups) + len(facts.ratios)
    assert sum("? (" in row for row in with_error) == len(facts.speedups) - len(KNOWN)
    [row] = [row for row in rows if row.startswith("| Llama-3.1-8B | self | 32000 | 128 | 4 | 1.47 |")]
    fact = next(fact for fact in KNOWN if fact["value"] == 1.47)
    assert f"| 1.47 | {predict(fact):.2f} ({predict(fact) / 1.47 - 1:+.0%}) | not measured |" in row


def test_costs_of_a_cpu_are_compared_by_the_rates_around_them(tmp_path):
    rows = [{"B": 1, "prefix_len": 1000, "cost": "plain step", "predicted_ms": 90.0, "measured_ms": 100.0}]
    rows.append(rows[0] | {"cost": "verification, gamma 3", "predicted_ms": 150.0})
    speedups = [{"predicted": 1.1, "from_measured_costs": 1.0}]
    record = ORIGIN | {"benchmark": "cpu_roofline", "threads": 1, "rows": rows, "speedups": speedups}
    write(tmp_path / roofline_error.ROOFLINE, record | {"rows": rows[:1]}, record)
    text = published_page.page(tmp_path, tmp_path)
    assert (
        "predicted costs are off by 10% and 30% in the median of 2, and speedups that follow from them by 10% and 10%"
        in text
    )
    assert (
        "| 1 | 1000 | plain step | 90.0 | 100.0 | -10% |" in text and "[roofline.jsonl](results/roofline.jsonl)" in text
    )


def test_this_cpus_costs_are_measured_beside_their_predictions(monkeypatch, tmp_path):
    """The rates of a cell are the means of those before and after it."""
    given = iter([10e9, 20e9, 40e9])
    machine = cpu_roofline.Machine(0, 1e12, 1e11, launch=1e-6, tile=1)
    monkeypatch.setattr(cpu_roofline, "cpu_rates", lambda: cpu_roofline.replace(machine, bandwidth=next(given)))
    monkeypatch.setattr(cpu_roofline, "SIZES", cpu_roofline.replace(cpu_roofline.SIZES, batches=(1,)))
    config = predicted.preset_config("HuggingFaceTB/SmolLM2-135M-Instruct")
    session = type("Session", (), {"plan": type("Plan", (), {"target": type("Source", (), {"config": config})})})
    monkeypatch.setattr(cpu_roofline, "open_largest", lambda flags: session)
    costs = Costs(100.0, (1, 3, 5), (110.0, 130.0, 150.0), 30.0, 1.0)

    def grid(session, flags):
        return CostGrid.of(list(flags.configs()), {(1, flags.contexts[0]): [costs, costs]})

    monkeypatch.setattr(cpu_roofline, "measure_grid", grid)
    monkeypatch.setattr(cpu_roofline, "record_of", lambda name, session, measured, without: measured)
    record = cpu_roofline.measure()
    assert record["bandwidth_each"] == [10e9, 20e9, 40e9]
    assert len(record["rows"]) == 2 * (1 + 3 + 2) and len(record["speedups"]) == 2 * 2 * 3
    plain = [row for row in record["rows"] if row["cost"] == "plain step"]
    bytes_read = [
        4 * cpu_roofline.ModelStorage(config).n_weights + context * 4 * 2 * 30 * 3 * 64 for context in (1000, 4000)
    ]
    by_hand = [n / rate * 1e3 + 330 * 1e-3 for n, rate in zip(bytes_read, (15e9, 30e9), strict=True)]
    assert [row["predicted_ms"] for row in plain] == pytest.approx(by_hand)
    assert {row["measured_ms"] for row in plain} == {100.0}
