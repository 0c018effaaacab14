"""Speedups of fixed drafts, and of `auto`, interleaved with plain decoding from one prefilled state.

    python reproduce/gamma_cell.py --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3
    python reproduce/gamma_cell.py --fixed --gammas 3 --budgets 512 --draft_weights same int8

`auto` chooses gamma at the largest budget, `auto budget` both, as `--gamma auto --draft_budget auto` does. Right before
each of their runs, what their rounds cost and accept is measured anew, on the same prompts; the time of that is in no
speedup (`measured_costs_seconds`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, Literal

import bench
import engine
from bench.config import ComparedSampling, Output, RunConfig, Sizes, Target, Text
from bench.draft_flags import CHOSEN, BudgetedName, draft_flags
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from engine.counts import acceptance_standard_error, total
from engine.timing import PhaseTimer
from models.names import Dtype, Scheme
from reproduce.paper.auto_against_fixed import AUTO, AUTO_BUDGET, LEAST_GEN_LEN
from reproduce.paper.in_turns import in_turns

OPTIONS = ("draft_budget", "gamma", "draft_dtype", "draft_weights")
DraftDtypes, DraftWeights = tuple[Literal["auto", "same"] | Dtype, ...], tuple[Literal["auto", "same"] | Scheme, ...]
SelfDraft: Any = draft_flags(["self"], without=(*CHOSEN, *OPTIONS))
# Of runs that drafted, beside plain decoding in the same repeat.
MEDIANS = (
    *("wall_speedup", "baseline_tokens_per_second", "decode_tokens_per_second", "baseline_step_ms", "round_ms"),
    *("draft_step_ms", "verify_step_ms", "mean_accepted_length", "identical_sequences", "sequences"),
)


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"gamma": "--gammas", "draft_budget": "--budgets"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    output: Output = field(default_factory=Output)
    draft: SelfDraft = field(default_factory=SelfDraft)
    gammas: tuple[int, ...] = (1, 3, 5)  # fixed gammas
    budgets: tuple[int, ...] = (128, 512)  # KV entries of the draft
    draft_dtype: DraftDtypes = ("auto",)  # the draft's dtypes; auto modes have the first
    draft_weights: DraftWeights = ("auto",)  # the draft's linear layers; auto modes have the first
    draft_policy: BudgetedName = "streaming"  # what the draft's cache keeps
    fixed: bool = False  # without the auto modes
    repeats: int = 3  # how often all are run, interleaved

    def check(self) -> None:
        for name in ("gammas", "budgets"):
            require_at_least(name, min(getattr(self, name)), 1)
        require_at_least("gen_len", self.sizes.gen_len, LEAST_GEN_LEN)
        require_at_least("repeats", self.repeats, 1)

    def drafts(self) -> dict[str, dict[str, Any]]:
        """What each that drafts is chosen to be, by its name; every combination counts once."""
        budgets, stored = sorted(set(self.budgets)), [tuple(dict.fromkeys(getattr(self, n))) for n in OPTIONS[2:]]
        name = "b={} g={} {} {}" if len([*itertools.product(*stored)]) > 1 else "b={} g={}"
        ways = {name.format(*one): one for one in itertools.product(budgets, sorted(set(self.gammas)), *stored)}
        if not self.fixed:
            first = [values[0] for values in stored]
            ways |= {AUTO: (budgets[-1], AUTO, *first), AUTO_BUDGET: (AUTO, AUTO, *first)}
        names = ("draft_policy", *OPTIONS)
        return {name: dict(zip(names, (self.draft_policy, *way), strict=True)) for name, way in ways.items()}


@dataclass(frozen=True)
class Contender:
    """One of what is compared. plain: plain decoding beside it. draft: what was chosen. costs: what runs chose by."""

    name: str
    session: bench.Session
    plain: Contender | None = None
    drafters: list[engine.Drafter] = field(default_factory=list)
    draft: dict[str, Any] = field(default_factory=dict)
    outputs: list[bench.Decoded] = field(default_factory=list)
    costs: list[bench.RunCosts] = field(default_factory=list)

    def run(self) -> None:
        device = self.session.runner.device
        costs = bench.costs_of(self.session, self.drafters, whole=True) if self.drafters else None
        self.costs.extend([costs] if costs else [])
        pacing = bench.make_pacing(self.session, self.drafters, costs) if self.drafters else None
        # On a CPU a phase needs no synchronisation, so timing it costs nothing.
        timer = PhaseTimer(device) if self.drafters and device.type == "cpu" else None
        self.outputs.append(bench.decode(self.session, self.name, phase=timer, pacing=pacing))

    def row(self) -> dict[str, Any]:
        """Lists have a value a repeat; `measured_costs` one a drafter and rows. speedups: to plain, by repeat."""
        pairs = [*zip((self.plain or self).outputs, self.outputs, strict=True)]
        # LEAST_GEN_LEN makes every rate a number.
        plain_rates, rates = ([bench.tokens_per_second(one) for one in each] for each in zip(*pairs, strict=True))
        speedups = [own / plain for plain, own in zip(plain_rates, rates, strict=True)]
        choices = [[round_.choice for round_ in output.stats.rounds] for output in self.outputs]
        budgets = [[bench.cache_of(self.session, choice)["draft_budget"] for choice in run] for run in choices]
        same = min(bench.identical_rows(plain.tokens, own.tokens) for plain, own in pairs)
        budget, gamma = self.draft.get("draft_budget"), self.draft.get("gamma", 0)
        # A row's repeats are of one prompt, and so of one cluster.
        counts = [total(repeats) for repeats in zip(*(one.stats.rows for one in self.outputs), strict=True)]
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
            "measured_costs": [bench.costs_record(self.session, one.by_rows) for one in self.costs] or None,
            "measured_costs_seconds": [one.seconds for one in self.costs] or None,
        }
        if self.plain:
            passes = [bench.Passes(0.0, plain, own, own if own.phases else None) for plain, own in pairs]
            runs = [bench.make_record("", self.session, each) for each in passes]
            row |= {name: runs[0].get(name) for name in OPTIONS[2:]}
            seen = {name: [run[name] for run in runs] for name in MEDIANS}
            row |= {name: None if None in values else median(values) for name, values in seen.items()}
        return bench.rounded(row)


def main(flags: Flags) -> None:
    flags.check()
    chosen = flags.drafts()
    drafts = flags.draft.variants(*chosen.values())
    config = RunConfig(flags.target, flags.text, flags.sizes, sampling=flags.sampling, output=flags.output)
    session = bench.Session.of_plan(bench.resolve_several(config, drafts))
    prefill_seconds = bench.prefill(session)
    contenders = [plain := Contender("plain", session.variant(draft=None))]
    for (name, options), draft in zip(chosen.items(), drafts, strict=True):
        own = session.variant(draft=draft)
        contenders.append(Contender(name, own, plain, own.drafters(), options))
    for one in contenders:
        bench.warm_up(one.session, one.drafters)
    in_turns({one.name: one.run for one in contenders}, flags.repeats)
    rows = [one.row() for one in contenders]
    measured = {"repeats": flags.repeats, "prefill_seconds": round(prefill_seconds, 2), "rows": rows}
    publish(flags.output.output, bench.record_of("gamma_cell", session, measured, without=("gamma", "draft_budget")))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
