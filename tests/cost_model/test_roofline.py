"""The cost model: the formula and the roofline by hand, what pays best, and costs that runs have measured."""

import json
import re
from dataclasses import replace
from statistics import median

import pytest

from bench.auto.costs import Costs, tokens_per_round
from common.checkout import ROOT
from cost_model.machines import MACHINES, Collective, Machine, find_machine
from cost_model.report import Cell, best_of_each, costs_of
from cost_model.roofline import ModelStorage, forward_ms, predict_costs
from models.checkpoints.presets import preset_config
from models.config import ModelConfig
from reproduce.helpers.published import alpha_of, is_acceptance_known, predict, published_speedups
from tests.support.programs import BENCHMARKS, COST_MODEL, run

LLAMA_3 = preset_config("meta-llama/Meta-Llama-3.1-8B")
SMOLLM = preset_config("HuggingFaceTB/SmolLM2-135M-Instruct")
# 32 layers of 4096 x (4096 + 2 x 1024) and 4096 x 4096 of attention, 3 x 4096 x 14336 after it, and the head.
WEIGHTS = 32 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
KV_BYTES = 131072  # of a token: 2 x 32 layers x 8 heads x 128 x 2 bytes
BYTES_ONLY, OPS_ONLY = Machine(1e12, 1e40, 1e40, tile=1), Machine(1e40, 1e15, 1e14, tile=1)


def test_bytes_of_a_known_model_by_hand():
    """Entries and weights are read once for all tokens, in the bytes in which they are stored."""
    assert ModelStorage(LLAMA_3).n_weights_of(0) == WEIGHTS == 7_504_658_432
    for stored, weight, kv in (
        (ModelStorage(LLAMA_3), 2, 2),
        (ModelStorage(LLAMA_3, "float32"), 4, 4),
        (ModelStorage(LLAMA_3, "float16", "int8"), 1, 2),
        (ModelStorage(LLAMA_3, weights="int4", kv="fp8"), 0.625, 1),  # 4 bits, and 4 bytes for 32 weights
    ):
        for batch, tokens, context in ((1, 1, 0), (4, 4, 1000), (64, 1, 32000), (64, 4, 32000)):
            by_hand = weight * WEIGHTS + kv * KV_BYTES / 2 * batch * context
            assert forward_ms(stored, BYTES_ONLY, batch, tokens, context) == pytest.approx(by_hand / 1e9)


@pytest.mark.parametrize("dtype,rate", [("bfloat16", 1e15), ("float32", 1e14)])
def test_operations_by_hand(dtype, rate):
    for batch, tokens in ((1, 1), (8, 4)):
        by_hand = 2 * WEIGHTS * batch * tokens + 4 * 32 * 32 * 128 * tokens * 4000 * batch
        ms = forward_ms(ModelStorage(LLAMA_3, dtype), OPS_ONLY, batch, tokens, 4000)
        assert ms == pytest.approx(by_hand / rate * 1e3)


def test_ranks_halve_the_bytes_and_add_collectives():
    one, link = forward_ms(ModelStorage(LLAMA_3), BYTES_ONLY, 8, 4, 4000), Collective(1e-5, 2e-6, 1e11)
    two = forward_ms(ModelStorage(LLAMA_3), replace(BYTES_ONLY, devices=2, protocols=(link,)), 8, 4, 4000)
    # Of 2 devices an all-reduce has 2 steps and moves all bytes, a gather 1 and half of them.
    reduced, gathered = 1e-5 + 2 * 2e-6 + 8 * 4 * 4096 * 2 / 1e11, 1e-5 + 2e-6 + 8 * 4 * 128256 * 4 / 2 / 1e11
    assert two == pytest.approx(one / 2 + 1e3 * (65 * reduced + gathered))
    free = replace(BYTES_ONLY, devices=2, protocols=(Collective(0, 0, 1e40),))
    assert forward_ms(ModelStorage(LLAMA_3), free, 8, 4, 4000) == pytest.approx(one / 2)


def test_machines_are_named_or_given():
    assert find_machine("8xh100").devices == 8 and find_machine("L40S").devices == 1
    assert find_machine("A100") == MACHINES["A100-80"] != find_machine("A100-40")
    given = find_machine("2xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5,launch=1e-6")
    assert (given.bandwidth, given.ops, given.ops_32, given.launch) == (2e12, 3e14, 3e14, 1e-6)
    assert given.protocols == (Collective(1e-5, 0.0, 3e11),) and given.devices == 2


EXAMPLE = "--machine 8xA100 --model_name meta-llama/Meta-Llama-3.1-8B --B 64 --prefix_len 32000 --draft_budget 512"


def test_the_program_predicts_without_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # nothing is there
    ended = run(COST_MODEL, EXAMPLE.split())
    record, out = ended.record, ended.out
    assert "nothing measured" in out and " streaming 512 " in out and "what pays best" in out
    assert record["benchmark"] == "cost_prediction" and record["predicted_for"] == "8xA100"
    (row,) = record["rows"]
    assert (row["draft_policy"], row["draft_budget"], row["acceptance_rate"]) == ("streaming", 512, 0.81)
    assert record["acceptance_of"].startswith("published")  # no other draft has a rate
    wanted = forward_ms(ModelStorage(LLAMA_3), find_machine("8xA100"), 64, 1, 32000)
    assert row["predicted_plain_ms"] == pytest.approx(wanted, abs=1e-4)
    assert all(name.startswith("predicted_") for name in row if name.endswith("_ms"))
    assert record["best"][0]["draft_policy"] == "streaming" and record["best"][0]["predicted_speedup"] > 1
    assert "--alpha" in run(COST_MODEL, [*EXAMPLE.split(), "--draft_layers", "0-3"]).err, "published of all layers"


@pytest.mark.parametrize(
    "machine,fits", [("8xA100", True), ("2xA100", False), ("2xbandwidth=2e12,ops=3e14,link=3e11", True)]
)
def test_sizes_that_do_not_fit_the_memory_are_named_and_nothing_there_is_best(machine, fits):
    entries, weights = 64 * 32512 * LLAMA_3.kv_bytes_per_token(2), 2 * LLAMA_3.n_parameters
    found = find_machine(machine)
    assert ModelStorage(LLAMA_3).resident_bytes(found, 64 * 32512) == (entries + weights) / found.devices
    ended = run(COST_MODEL, EXAMPLE.replace("8xA100", machine).split())
    assert ("64 rows of 32000 tokens do not fit" in ended.err) != fits
    assert (ended.record["best"][0]["predicted_speedup"] is None) == ("does not fit" in ended.out) != fits
    assert bool(re.search(r" streaming .* \d\.\d\d$", ended.out, re.MULTILINE)) == fits


@pytest.mark.parametrize(("file", "model", "most"), [("gpu", LLAMA_3, 0.05), ("gpu_speedups", SMOLLM, 0.3)])
def test_predictions_for_measured_kernels_are_near_measured_rounds(file: str, model: ModelConfig, most: float) -> None:
    """The machine's numbers are from a round of the first model; the second is small, and bound by launches."""
    records = map(json.loads, (ROOT / f"reproduce/results/{file}.jsonl").read_text().splitlines())
    run = next(run for run in records if run.get("draft_step_ms") and "H200" in str(run.get("gpu")))
    sizes = run["B"], run["prefix_len"], run["draft_budget"], [run["gamma"]]
    costs = predict_costs(ModelStorage(model), ModelStorage(model), find_machine("H200-measured"), *sizes)
    assert costs.plain_ms == pytest.approx(run["baseline_step_ms"], rel=0.05)
    assert costs.draft_ms == pytest.approx(run["draft_step_ms"], rel=most)
    assert costs.round_ms(run["gamma"]) == pytest.approx(run["round_ms"], rel=0.1)


def test_predictions_are_near_what_was_published():
    """Between published contexts acceptance is interpolated."""
    assert alpha_of({"prefix_len": 8000}) == 0.83 and alpha_of({"prefix_len": 24000}) == pytest.approx(0.815)
    known = [fact for fact in published_speedups() if is_acceptance_known(fact)]
    assert len(known) == 22 and median(abs(predict(fact) / fact["value"] - 1) for fact in known) < 0.1
    losses = [predict(fact) for fact in known if fact["prefix_len"] == 4000]
    assert len(losses) == 4 and max(losses) < 1  # as published


CHEAP = Costs(100, (1, 3), (110, 130), 5, 1)


def test_a_round_is_drafts_verification_and_the_rest():
    assert tokens_per_round(0.8, 3) == pytest.approx(2.952)
    assert tokens_per_round(1.0, 4) == 5 and tokens_per_round(0.0, 4) == 1 and tokens_per_round(0.7, 0) == 1
    costs = Costs(100, (1, 3, 5), (110, 130, 170), 20, 4)
    assert costs.round_ms(3) == 3 * 20 + 130 + 4
    assert costs.round_ms(2) == 2 * 20 + 120 + 4
    assert costs.round_ms(7) == 7 * 20 + 210 + 4  # the last straight line goes on
    assert Costs(100, (3,), (130,), 20, 4).round_ms(1) == 20 + 110 + 4  # from a plain step at gamma 0
    assert costs.speedup(2.952, 3) == pytest.approx(2.952 * 100 / 194)


def test_what_pays_best_names_the_draft_and_gives_up_where_nothing_pays():
    """Each context by its acceptance."""
    costs = [("streaming", 64), CHEAP], [("snapkv", 512), replace(CHEAP, draft_ms=40)]
    for alphas in ((0.5, 0.99), (0.9, 0.91), (0.1, 0.95)):
        cells = [Cell(1, 100, draft, each, alpha) for (draft, each), alpha in zip(costs, alphas, strict=True)]
        cells += [Cell(2, context, *costs[0], alpha=0.0) for context in (100, 200)]
        by_hand = {
            (*cell.draft, gamma): tokens_per_round(cell.alpha, gamma) * 100 / cell.costs.round_ms(gamma)
            for cell in cells[:2]
            for gamma in (1, 3)
        }
        best, *others = best_of_each(cells, (1, 3))
        chosen = best["draft_policy"], best["draft_budget"], best["gamma"]
        assert chosen == max(by_hand, key=by_hand.__getitem__)
        assert best["predicted_speedup"] == pytest.approx(by_hand[chosen], abs=1e-4)
        nothing = {"draft_policy": None, "draft_budget": None, "gamma": 0, "predicted_speedup": 1.0}
        assert others == [{"B": 2, "prefix_len": context} | nothing for context in (100, 200)]


def test_costs_and_acceptance_of_runs_that_chose_are_read(call, tmp_path):
    """A sweep's lines have records, and rows of a comparison costs of every repeat; other lines are passed over."""
    path = tmp_path / "auto.jsonl"
    flags = "--B 2 --prefix_len 60 --gen_len 24 --device cpu --gamma auto --draft_budget auto --dtype float64"
    measured = call(BENCHMARKS[-1], f"{flags} --output {path}").record
    costs = {"measured_costs": [measured["measured_costs"]] * 2, "drafter": "self@auto", "acceptance_rate": 0.5}
    lines = (
        {"record": measured},
        {"record": None},
        {"benchmark": "baseline"},
        {"benchmark": "compare", "prefix_len": 60, "rows": [costs]},
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + path.read_text())
    ended = run(COST_MODEL, f"--records {path} --gammas 1 3".split())

    def best_speedup(alpha: float | None) -> float:
        """By hand, of two rows."""
        rows = [costs for costs in measured["measured_costs"] if costs["rows"] == 2]
        rates = [costs["accepted_share"] if alpha is None else alpha for costs in rows]
        pairs = [(costs_of(costs), rate, gamma) for costs, rate in zip(rows, rates, strict=True) for gamma in (1, 3)]
        return max(1.0, *(costs.speedup(tokens_per_round(rate, gamma), gamma) for costs, rate, gamma in pairs))

    (best,) = (row for row in ended.record["best"] if row["B"] == 2)
    assert best["predicted_speedup"] == pytest.approx(best_speedup(None), abs=2e-3) and best["prefix_len"] == 60
    assert ended.out.count("streaming ") >= 4 * len(measured["measured_costs"]) and "what pays best" in ended.out
    given = run(COST_MODEL, f"--records {path} --gammas 1 3 --alpha 0".split())
    (best,) = (row for row in given.record["best"] if row["B"] == 2)
    assert best["predicted_speedup"] == pytest.approx(best_speedup(0.0), abs=2e-3)
    assert "--alpha" in given.out and "--alpha" not in ended.out
