"""The rule that chooses drafter and gamma before every round, simulated on recorded costs, against an oracle.

The costs are the medians of those that `gamma_cell.py` measured before its runs of `auto budget`, of several budgets at
five sizes, and those of a draft model that hardly pays. A scenario decodes a text whose stretches have acceptance rates
of their own. The oracle knows them, and makes the rounds that have the most expected tokens per ms; a rule's score is
its tokens per ms as a share of that. A score above 1 is luck.
"""

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest

from bench.auto.adaptive import Adaptive
from bench.auto.costs import Costs, tokens_per_round
from common.checkout import ROOT
from common.jsonl import read_lines
from engine.counts import AcceptanceRate
from engine.pacing import PLAIN, Choice, Fixed, Pacing
from reproduce.helpers.cost_errors import AUTO_BUDGET, runs_of

SCENARIOS = Path(__file__).with_name("pacing_scenarios.json")
RESULTS = ROOT / "reproduce" / "results"
GAMMAS = range(7)
# Draft positions a row that were verified of each drafter while costs were measured.
VERIFIED = 8
# The draft model's size among the recorded ones.
PAIR = (4, 1500)
RULES: dict[str, Callable[[Sequence[Any], Mapping[int, Mapping[int, Sequence[Costs]]], Sequence[int]], Pacing]] = {
    "plain": lambda drafters, costs, gammas: Fixed(None),
    "gamma 3": lambda drafters, costs, gammas: Fixed(drafters[0]),
    "adaptive": Adaptive,
}


@dataclass(frozen=True)
class Scenario:
    """size: the (rows, context) whose costs a round has. rows: those that decode. stretches: (new tokens a row,
    acceptance rate of each drafter). measured: the rates seen beforehand, where not those of the first stretch; None
    where nothing was. spread: a row's block has a rate that is so much higher or lower. draft_share: of the recorded
    ms of a draft step. A draft model that missed rounds runs their tokens; others catch up in the time of a draft step.
    """

    name: str
    size: Sequence[int]
    rows: int
    stretches: Sequence[tuple[int, Sequence[float]]]
    measured: Sequence[float | None] | None = None
    spread: float = 0.05
    draft_share: float = 1.0

    def rates(self, drafter: int, position: float) -> tuple[float, float]:
        """The two rates that a row's block has half the time each, behind so many new tokens."""
        ends = itertools.accumulate(n_tokens for n_tokens, _ in self.stretches)
        alphas = next(alphas for end, (_, alphas) in zip(ends, self.stretches, strict=True) if position < end)
        return max(0.0, alphas[drafter] - self.spread), min(1.0, alphas[drafter] + self.spread)

    def n_accepted(self, choice: Choice, position: float, rng: random.Random) -> int:
        if choice.drafter is None:
            return 0
        rate = rng.choice(self.rates(choice.drafter, position))
        return next(n for n in itertools.count() if n == choice.gamma or rng.random() >= rate)

    def seen(self, drafter: int, rng: random.Random) -> AcceptanceRate | None:
        """What was accepted while costs were measured."""
        rate, n = (self.measured or self.stretches[0][1])[drafter], VERIFIED * self.rows
        return None if rate is None else AcceptanceRate(sum(rng.random() < rate for _ in range(n)) / n, n)

    def oracle_ms(self, costs: Sequence[Costs]) -> float:
        position, ms = 0, 0.0
        for n_tokens, _ in self.stretches:
            per_token = [costs[0].plain_ms]
            for (drafter, one), gamma in itertools.product(enumerate(costs), GAMMAS[1:]):
                tokens = fmean(tokens_per_round(rate, gamma) for rate in self.rates(drafter, position))
                per_token.append(one.round_ms(gamma) / tokens)
            ms += n_tokens * min(per_token)
            position += n_tokens
        return ms


def recorded_costs() -> dict[tuple[int, int], list[Costs]]:
    """By (rows, context), from the largest budget to the smallest, while all rows decode."""
    found = {}
    for run in runs_of([line["record"] for _, line in read_lines(RESULTS / "cost_model.jsonl")]):
        by_way, n_rows = {row["way"]: row for row in run["rows"]}, run["B"]
        if AUTO_BUDGET in by_way:
            each = by_way[AUTO_BUDGET]["measured_costs"]
            of_all_rows = ([one for one in costs if one.get("rows", n_rows) == n_rows] for costs in each)
            found[n_rows, run["prefix_len"]] = [medians(runs) for runs in zip(*of_all_rows, strict=True)]
    pairs = (line for _, line in read_lines(RESULTS / "old_new_pairs.jsonl"))
    runs = [run["measured_costs"][0] for run in pairs if run["draft_model"] and run["measured_costs"]]
    return found | {PAIR: [medians([run for run in runs if run["gammas"][-1] == GAMMAS[-1]])]}


def medians(runs: Sequence[dict]) -> Costs:
    plain, draft, other = (median(run[key] for run in runs) for key in ("plain_ms", "draft_ms", "other_ms"))
    verify = tuple(map(median, zip(*(run["verify_ms"] for run in runs), strict=True)))
    return Costs(plain, tuple(runs[0]["gammas"]), verify, draft, other)


def score(rule: str, scenario: Scenario, all_costs: Sequence[Costs], seed: int) -> float:
    """Tokens per ms as a share of the oracle's."""
    rng, copies = random.Random(seed), tuple(scenario.size) != PAIR
    stand_in = SimpleNamespace(gamma=3, runs_missed=not copies)
    n_drafters = len(scenario.stretches[0][1])
    costs = [replace(one, draft_ms=one.draft_ms * scenario.draft_share) for one in all_costs[:n_drafters]]
    given = [replace(one, acceptance=scenario.seen(index, rng)) for index, one in enumerate(costs)]
    pacing = RULES[rule]([stand_in] * n_drafters, {scenario.size[1]: {scenario.rows: given}}, GAMMAS)
    length = sum(n_tokens for n_tokens, _ in scenario.stretches)
    position, ms, n_rounds, followed = 0.0, 0.0, 0, [0] * n_drafters
    while position < length:
        choice = pacing.choose(scenario.rows, 0, scenario.size[1]) or PLAIN
        accepted = [scenario.n_accepted(choice, position, rng) for _ in range(scenario.rows)]
        round_ms = costs[0].plain_ms
        n_rounds += 1
        if (index := choice.drafter) is not None:
            missed, followed[index] = n_rounds - followed[index] - 1, n_rounds
            catch_up_ms = costs[index].catch_up_ms(0 if copies else missed) if missed else 0.0
            round_ms = costs[index].round_ms(choice.gamma) + catch_up_ms
        pacing.observe(choice, accepted)
        emitted = 1 + fmean(accepted)
        ms += round_ms * min(1.0, (length - position) / emitted)
        position += emitted
    return scenario.oracle_ms(costs) / ms


@pytest.mark.parametrize("n_seeds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_rule_comes_near_an_oracle_where_nothing_fixed_does(n_seeds: int) -> None:
    """In every scenario, and in the mean of all; -rP shows the scores."""
    costs, shares = recorded_costs(), dict[str, dict[str, float]]()
    for scenario in [Scenario(**each) for each in json.loads(SCENARIOS.read_text())]:
        own = costs[*scenario.size]
        each = {rule: fmean(score(rule, scenario, own, seed) for seed in range(n_seeds)) for rule in RULES}
        print(scenario.name, each)
        shares[scenario.name] = each
    mean = {rule: fmean(each[rule] for each in shares.values()) for rule in RULES}
    print(mean)
    assert mean["adaptive"] > 0.95 and max(mean["plain"], mean["gamma 3"]) < 0.85
    assert min(each["adaptive"] for each in shares.values()) > 0.85
