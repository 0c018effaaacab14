"""Compare ways to decode by interleaved runs, every second time in reverse order, so that all share the drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import bench
import engine
from bench.config import AUTO
from engine.counts import acceptance_standard_error, total
from engine.timing import PhaseTimer

Key, Value = TypeVar("Key"), TypeVar("Value")
# Medians over repeats of what a run and plain decoding in the same repeat measured.
MEDIANS = (
    *("wall_speedup", "baseline_tokens_per_second", "decode_tokens_per_second", "baseline_step_ms", "round_ms"),
    *("draft_step_ms", "verify_step_ms", "mean_accepted_length", "identical_sequences", "sequences"),
)


def in_turns(runs: Mapping[Key, Callable[[], Value]], repeats: int) -> dict[Key, list[Value]]:
    """Call every run `repeats` times, and return its results by repeat."""
    found: dict[Key, list[Value]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            found[name].append(runs[name]())
    return found


@dataclass(frozen=True)
class Contender:
    """A way to decode that is compared. plain: the contender without drafts. draft: the options in which contenders
    differ. costs: the costs by which each run chose its drafts."""

    name: str
    session: bench.Session
    plain: Contender | None = None
    drafters: list[engine.Drafter] = field(default_factory=list)
    draft: dict[str, Any] = field(default_factory=dict)
    outputs: list[bench.Decoded] = field(default_factory=list)
    costs: list[bench.RunCosts] = field(default_factory=list)

    def run(self) -> None:
        device, costs, pacing, timer = self.session.runner.device, None, None, None
        if self.drafters:
            costs = bench.costs_of(self.session, self.drafters, whole=True)
            pacing = bench.make_pacing(self.session, self.drafters, costs)
            # On a CPU a phase needs no synchronisation, so timing it costs nothing.
            timer = PhaseTimer(device) if device.type == "cpu" else None
        self.costs.extend([costs] if costs else [])
        self.outputs.append(bench.decode(self.session, self.name, phase=timer, pacing=pacing))

    def row(self) -> dict[str, Any]:
        """Return the row of a record. Lists have a value for each repeat. Speedups are over plain decoding in the same
        repeat. A run has at least two new tokens, since the first comes from prefill."""
        pairs = [*zip((self.plain or self).outputs, self.outputs, strict=True)]
        plain_rates, rates = ([bench.tokens_per_second(output) for output in each] for each in zip(*pairs, strict=True))
        speedups = [rate / plain for plain, rate in zip(plain_rates, rates, strict=True)]
        choices = [[round_.choice for round_ in output.stats.rounds] for output in self.outputs]
        budgets = [[bench.cache_of(self.session, choice)["draft_budget"] for choice in run] for run in choices]
        same = min(bench.identical_rows(plain.tokens, output.tokens) for plain, output in pairs)
        budget, gamma = self.draft.get("draft_budget"), self.draft.get("gamma", 0)
        # Repeats of a row have the same prompt, so they are a single cluster.
        counts = [total(repeats) for repeats in zip(*(output.stats.rows for output in self.outputs), strict=True)]
        row = {
            "way": self.name,
            "draft_budget": budget,
            "gamma": gamma,
            "pointwise": self.session.runner.model.pointwise.name,
            "tokens_per_second": rates,
            "speedup": median(speedups),
            "speedups": speedups,
            "acceptance_rate": total(counts).acceptance_rate,
            "acceptance_standard_error": acceptance_standard_error(counts),
            "identical_rows": same if self.session.plan.reproducible else None,
            "gammas": [[choice.gamma for choice in run] for run in choices] if gamma == AUTO else None,
            "budgets": budgets if budget == AUTO else None,
            "measured_costs": [bench.costs_record(self.session, costs.by_rows) for costs in self.costs] or None,
            "measured_costs_seconds": [costs.seconds for costs in self.costs] or None,
        }
        if self.plain:
            passes = [
                bench.PassResults(0.0, plain, output, output if output.phases else None) for plain, output in pairs
            ]
            runs = [bench.make_record("", self.session, each) for each in passes]
            row |= {name: runs[0].get(name) for name in ("draft_dtype", "draft_weights")}
            values = {name: [run[name] for run in runs] for name in MEDIANS}
            row |= {name: None if None in each else median(each) for name, each in values.items()}
        return bench.rounded(row)
