"""Rules that choose drafter and gamma before every round, simulated on recorded costs, against an oracle.

    python reproduce/pacing_rules.py --seeds 20

The costs are the medians of those that `gamma_cell.py` measured before its runs of `auto budget`, of several budgets at
five sizes, and those of a draft model that hardly pays. A scenario decodes a text whose stretches have acceptance rates
of their own. The oracle knows them, and makes the rounds that have the most expected tokens per ms; a rule's score is
its tokens per ms as a share of that. A score above 1 is luck.
"""

import itertools
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.errors import require_at_least
from common.jsonl import publish, read_lines, require_appendable
from common.provenance import provenance
from common.tables import Column, console
from engine.acceptance import AcceptanceRate
from engine.bench.config import Output
from engine.cost_model.adaptive import Adaptive
from engine.cost_model.costs import Costs, tokens_per_round
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, Fixed, Pacing
from reproduce.paper.auto_against_fixed import AUTO_BUDGET, runs_of

COSTS = Path(__file__).parent / "results" / "cost_model.jsonl"
SCENARIOS = Path(__file__).with_suffix(".json")
GAMMAS = range(7)
# Draft positions a row that were verified of each drafter while costs were measured.
VERIFIED = 8
# The draft model's size among those of COSTS.
PAIR = (4, 1500)
RULES: dict[str, Callable[[Sequence[Drafter], Mapping[int, Sequence[Costs]], Sequence[int]], Pacing]] = {
    "plain": lambda drafters, costs, gammas: Fixed(None),
    "gamma 3": lambda drafters, costs, gammas: Fixed(drafters[0]),
    "adaptive": Adaptive,
}
COLUMNS = (Column("scenario", "share of the oracle", align="<"), *(Column(rule, rule, ".3f") for rule in RULES))


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


def recorded_costs() -> dict[tuple[int, int], list[Costs]]:
    """By (rows, context), from the largest budget to the smallest, while all rows decode."""
    found = {}
    for run in runs_of([line["record"] for _, line in read_lines(COSTS)]):
        by_way, n_rows = {row["way"]: row for row in run["rows"]}, run["B"]
        if AUTO_BUDGET in by_way:
            each = by_way[AUTO_BUDGET]["measured_costs"]
            of_all_rows = ([one for one in costs if one.get("rows", n_rows) == n_rows] for costs in each)
            found[n_rows, run["prefix_len"]] = [_median(runs) for runs in zip(*of_all_rows, strict=True)]
    pairs = (line for _, line in read_lines(COSTS.with_name("old_new_pairs.jsonl")))
    runs = [run["measured_costs"][0] for run in pairs if run["draft_model"] and run["measured_costs"]]
    return found | {PAIR: [_median([run for run in runs if run["gammas"][-1] == GAMMAS[-1]])]}


def _median(runs: Sequence[dict]) -> Costs:
    plain, draft, other = (median(run[key] for run in runs) for key in ("plain_ms", "draft_ms", "other_ms"))
    verify = tuple(map(median, zip(*(run["verify_ms"] for run in runs), strict=True)))
    return Costs(plain, tuple(runs[0]["gammas"]), verify, draft, other)


def score(rule: str, scenario: Scenario, all_costs: Sequence[Costs], seed: int) -> float:
    """Tokens per ms as a share of the oracle's."""
    rng, copies = random.Random(seed), tuple(scenario.size) != PAIR
    stand_in: Any = SimpleNamespace(gamma=3, verification_cache=copies or None)
    n_drafters = len(scenario.stretches[0][1])
    costs = [replace(one, draft_ms=one.draft_ms * scenario.draft_share) for one in all_costs[:n_drafters]]
    given = [replace(one, acceptance=_measured(scenario, index, rng)) for index, one in enumerate(costs)]
    pacing = RULES[rule]([stand_in] * n_drafters, {scenario.rows: given}, GAMMAS)
    length = sum(n_tokens for n_tokens, _ in scenario.stretches)
    position, ms, n_rounds, followed = 0.0, 0.0, 0, [0] * n_drafters
    while position < length:
        choice = pacing.choose(scenario.rows) or PLAIN
        accepted = [_n_accepted(scenario, choice, position, rng) for _ in range(scenario.rows)]
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
    return oracle_ms(scenario, costs) / ms


def _measured(scenario: Scenario, drafter: int, rng: random.Random) -> AcceptanceRate | None:
    rate = (scenario.measured or scenario.stretches[0][1])[drafter]
    if rate is None:
        return None
    n = VERIFIED * scenario.rows
    return AcceptanceRate(sum(rng.random() < rate for _ in range(n)) / n, n)


def _n_accepted(scenario: Scenario, choice: Choice, position: float, rng: random.Random) -> int:
    if choice.drafter is None:
        return 0
    rate = rng.choice(scenario.rates(choice.drafter, position))
    return next(n for n in itertools.count() if n == choice.gamma or rng.random() >= rate)


def oracle_ms(scenario: Scenario, costs: Sequence[Costs]) -> float:
    position, ms = 0, 0.0
    for n_tokens, _ in scenario.stretches:
        per_token = [costs[0].plain_ms]
        for (drafter, one), gamma in itertools.product(enumerate(costs), GAMMAS[1:]):
            tokens = fmean(tokens_per_round(rate, gamma) for rate in scenario.rates(drafter, position))
            per_token.append(one.round_ms(gamma) / tokens)
        ms += n_tokens * min(per_token)
        position += n_tokens
    return ms


@dataclass(frozen=True)
class Flags(Output):
    seeds: int = 20  # how often every scenario is decoded by every rule


def main(flags: Flags) -> None:
    require_at_least("seeds", flags.seeds, 1)
    require_appendable(flags.output)
    costs, rows = recorded_costs(), list[dict]()
    for scenario in [Scenario(**each) for each in json.loads(SCENARIOS.read_text())]:
        own = costs[*scenario.size]
        shares = {rule: fmean(score(rule, scenario, own, seed) for seed in range(flags.seeds)) for rule in RULES}
        rows.append({"scenario": scenario.name, **{rule: round(share, 4) for rule, share in shares.items()}})
    rows.append({"scenario": "mean", **{rule: round(fmean(row[rule] for row in rows), 4) for rule in RULES}})
    record = {"benchmark": "pacing_rules", "seeds": flags.seeds, "rows": rows, **provenance()}
    publish(flags.output, record, console(rows, COLUMNS, indent=""))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
