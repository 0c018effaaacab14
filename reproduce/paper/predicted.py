"""What the roofline predicts of every published number, from the machines' data sheets and how the kernels work."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from engine.cost_model.costs import Costs, tokens_per_round
from engine.cost_model.machines import Machine, find_machine
from engine.cost_model.roofline import Kernels, Stored, predict_costs
from models.presets import preset_config
from reproduce.paper.published import SELF, Record, draft_name, published, target_name

# The published system attends with FlashAttention-2, whose kernels over a cache have tiles of 64 rows, and put heads
# that share KV into one only where there is one token (csrc/flash_attn: kBlockM, seqlenq_ngroups_swapped).
FLASH_ATTENTION_2 = Kernels(tile=64, packs_group=False)
GAMMAS = (1, 2, 3, 4, 5, 6)
# Marks a prediction whose acceptance is not published.
ASSUMED = "?"
# Values that a fit tries of each constant: factors of what is stated, but for the seconds of a forward.
TRIED: Mapping[str, Sequence[float]] = {
    "memory bandwidth": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "operations": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "link bandwidth": (0.05, 0.1, 0.2, 0.4, 0.7, 1.0),
    "collective latency": (1.0, 2.0, 3.0, 4.0),
    "kernel launch": (1.0, 2.0, 4.0, 6.0),
    "ms of a forward that nothing explains": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
}


@dataclass(frozen=True)
class Roofline:
    """How predictions are made: the kernels, and constants of TRIED that are not what is stated."""

    kernels: Kernels = FLASH_ATTENTION_2
    constants: Mapping[str, float] = field(default_factory=dict)

    def machine(self, name: str) -> Machine:
        one, by = find_machine(name), {name: self.constants.get(name, 1.0) for name in TRIED}
        protocols = (
            replace(
                protocol,
                bandwidth=protocol.bandwidth * by["link bandwidth"],
                latency=protocol.latency * by["collective latency"],
                hop=protocol.hop * by["collective latency"],
            )
            for protocol in one.protocols
        )
        return replace(
            one,
            bandwidth=one.bandwidth * by["memory bandwidth"],
            ops=one.ops * by["operations"],
            launch=one.launch * by["kernel launch"],
            protocols=tuple(protocols),
        )

    def costs(self, fact: Record, budget: int) -> Costs:
        """Of a published number's setting; published theory names no machine."""
        machine = self.machine("8xH100" if "8xH100" in fact.get("origin", "") else "8xA100")
        if "kind" in fact:
            machine = replace(machine, devices=1, launch=0.0)
        target, name = _stored(target_name(fact)), draft_name(fact)
        draft = target if name == SELF else _stored(name)
        how = replace(self.kernels, forward_s=self.constants.get("ms of a forward that nothing explains", 0.0) / 1e3)
        sizes = {"batch": fact["B"], "context": fact["prefix_len"], "budget": budget, "gammas": GAMMAS}
        return predict_costs(target, draft, machine, **sizes, how=how)

    def speedup(self, fact: Record) -> float:
        """At the published gamma, or at the best one where only the speedup at the best is published."""
        costs, alpha = self.costs(fact, published().draft_budget), alpha_of(fact)
        gammas = GAMMAS if fact["gamma"] is None else (fact["gamma"],)
        return max(costs.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in gammas)

    def ratio(self, fact: Record) -> float:
        """Of a verification or a draft step over a plain step."""
        costs = self.costs(fact, fact["draft_budget"] or published().draft_budget)
        of = costs.draft_ms if fact["kind"] == "draft" else costs.verify_ms[costs.at.index(fact["gamma"])]
        return of / costs.plain_ms

    def value(self, fact: Record) -> float:
        return self.ratio(fact) if "kind" in fact else self.speedup(fact)

    def error(self, fact: Record) -> float:
        """Predicted over published, less 1."""
        return self.value(fact) / fact["value"] - 1


# As measured speedups were made, and as theory that counts bytes and operations alone.
STATED, IDEAL = Roofline(), Roofline(Kernels())


def _stored(name: str) -> Stored:
    return Stored(preset_config(published().checkpoint_names[name][0]))


def is_acceptance_known(fact: Record) -> bool:
    return published().alpha(target_name(fact), draft_name(fact), fact["prefix_len"]) is not None


def alpha_of(fact: Record) -> float:
    """The published acceptance; where there is none, it is assumed to be that of the one published pair, between its
    contexts on straight lines, beyond them that of the nearest."""
    known = published().alpha(target_name(fact), draft_name(fact), fact["prefix_len"])
    by_context = sorted((one["prefix_len"], one["value"]) for one in published().acceptance)
    return float(np.interp(fact["prefix_len"], *zip(*by_context, strict=True))) if known is None else known


def median_error(facts: Sequence[Record], roofline: Roofline) -> float:
    return median(abs(roofline.error(fact)) for fact in facts)


def halves(facts: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """To fit and to test: every other setting, by machine, context and rows; numbers of one setting stay together."""

    def setting(fact: Record) -> tuple[bool, int, int]:
        return "8xH100" in fact["origin"], fact["prefix_len"], fact["B"]

    order = sorted(set(map(setting, facts)))
    fitted = [fact for fact in facts if order.index(setting(fact)) % 2 == 0]
    return fitted, [fact for fact in facts if fact not in fitted]


def fit(facts: Sequence[Record], names: Sequence[str]) -> Roofline:
    """Of the values tried of those constants, the ones with the least mean square of the logarithms' differences."""
    values: list[tuple[float, ...]] = [()]
    for name in names:
        values = [(*known, value) for known in values for value in TRIED[name]]
    return min(
        (Roofline(constants=dict(zip(names, one, strict=True))) for one in values), key=lambda of: spread(facts, of)
    )


def spread(facts: Sequence[Record], roofline: Roofline) -> float:
    return math.sqrt(sum(math.log1p(roofline.error(fact)) ** 2 for fact in facts) / len(facts))
