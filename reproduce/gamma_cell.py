"""Speedups of fixed gammas and budgets, and of `auto`, interleaved with plain decoding from one prefilled state.

    python reproduce/gamma_cell.py --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3

Every repeat, every other one in reverse order, runs plain decoding, each fixed pair, `auto`, which chooses gamma at the
largest budget, and `auto budget`, which chooses both, as `--gamma auto --draft_budget auto` does: its budgets are that
flag's own. Right before each of their runs, what their rounds cost and accept is measured anew, on the same prompts;
the time of that is in no speedup (`measured_costs_seconds`). The record is the last line of standard output;
cost_model_error.py compares it with what the cost model predicts.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import engine
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from engine.bench.config import Output, RunConfig, Sampling, Sizes, Target, Text
from engine.bench.draft_flags import CHOSEN, BudgetedName, draft_flags
from reproduce.paper.auto_against_fixed import AUTO, AUTO_BUDGET, LEAST_GEN_LEN

if TYPE_CHECKING:
    from engine.bench.auto_costs import RunCosts

SelfDraft: Any = draft_flags(["self"], without=CHOSEN)


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"gamma": "--gammas", "draft_budget": "--budgets"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    sampling: Sampling = field(default_factory=Sampling)
    output: Output = field(default_factory=Output)
    draft: SelfDraft = field(default_factory=SelfDraft)
    gammas: tuple[int, ...] = (1, 3, 5)  # fixed gammas
    budgets: tuple[int, ...] = (128, 512)  # KV entries of the draft
    draft_policy: BudgetedName = "streaming"  # what the draft's cache keeps
    repeats: int = 3  # how often all are run, interleaved

    def check(self) -> None:
        for name in ("gammas", "budgets"):
            require_at_least(name, min(getattr(self, name)), 1)
        require_at_least("gen_len", self.sizes.gen_len, LEAST_GEN_LEN)
        require_at_least("repeats", self.repeats, 1)

    def drafts(self) -> dict[str, dict[str, Any]]:
        """What each that drafts is chosen to be, by its name; every gamma and budget counts once."""
        budgets, gammas = sorted(set(self.budgets)), sorted(set(self.gammas))
        pairs = {f"b={budget} g={gamma}": (budget, gamma) for budget, gamma in itertools.product(budgets, gammas)}
        pairs |= {AUTO: (budgets[-1], AUTO), AUTO_BUDGET: (AUTO, AUTO)}
        return {
            name: {"draft_policy": self.draft_policy, "draft_budget": budget, "gamma": gamma}
            for name, (budget, gamma) in pairs.items()
        }


@dataclass(frozen=True)
class Contender:
    """One of what is compared; without drafters, plain decoding. outputs: of its runs. costs: what they chose by, where
    there was something to choose.
    """

    name: str
    session: engine.Session
    drafters: Sequence[engine.Drafter] = ()
    budget: int | str | None = None
    gamma: int | str = 0
    outputs: list[engine.GenerateOutput] = field(default_factory=list)
    costs: list[RunCosts] = field(default_factory=list)

    def run(self) -> None:
        from engine.bench.auto_costs import costs_of
        from engine.bench.passes import decode, make_pacing

        costs = costs_of(self.session, self.drafters, whole=True) if self.drafters else None
        self.costs.extend([costs] if costs else [])
        pacing = make_pacing(self.session, self.drafters, costs) if self.drafters else None
        self.outputs.append(decode(self.session, self.name, pacing=pacing))

    def row(self, plain: Sequence[engine.GenerateOutput]) -> dict[str, Any]:
        """Lists have one value a repeat, but `measured_costs`, which has one a drafter and number of rows for each.

        speedups: to plain decoding in the same repeat; speedup: their median.
        """
        from engine.bench.record import costs_record, drafting_budget, identical_rows, rounded, tokens_per_second
        from engine.stats import total

        # LEAST_GEN_LEN makes every rate a number.
        rates, plain_rates = (list(map(tokens_per_second, each)) for each in (self.outputs, plain))
        speedups = list(map(operator.truediv, rates, plain_rates))
        choices = [[round_.choice for round_ in output.stats.rounds] for output in self.outputs]
        same = [identical_rows(a.tokens, b.tokens) for a, b in zip(self.outputs, plain, strict=True)]
        budgets = [[drafting_budget(self.session, choice) for choice in run] for run in choices]
        row = {
            "way": self.name,
            "draft_budget": self.budget,
            "gamma": self.gamma,
            "tokens_per_second": rates,
            "speedup": median(speedups),
            "speedups": speedups,
            "acceptance_rate": total([output.stats.counts for output in self.outputs]).acceptance_rate,
            "identical_rows": min(same) if self.session.sampling.reproducible else None,
            "gammas": [[choice.gamma for choice in run] for run in choices] if self.gamma == AUTO else None,
            "budgets": budgets if self.budget == AUTO else None,
            "measured_costs": [costs_record(self.session, one.by_rows) for one in self.costs] or None,
            "measured_costs_seconds": [one.seconds for one in self.costs] or None,
        }
        return rounded(row)


def main(flags: Flags) -> None:
    from engine.bench import passes, record
    from engine.bench.plan import resolve_several

    flags.check()
    chosen = flags.drafts()
    drafts = flags.draft.variants(*chosen.values())
    config = RunConfig(flags.target, flags.text, flags.sizes, sampling=flags.sampling, output=flags.output)
    session = engine.Session.of_plan(resolve_several(config, drafts))
    prefill_seconds = passes.prefill(session)
    contenders = [plain := Contender("plain", session)]
    for (name, options), draft in zip(chosen.items(), drafts, strict=True):
        own = session.variant(draft=draft)
        contenders.append(Contender(name, own, own.drafters(), options["draft_budget"], options["gamma"]))
    for one in contenders:
        passes.warm_up(one.session, one.drafters)
    for repeat in range(flags.repeats):
        for one in contenders if repeat % 2 == 0 else reversed(contenders):  # against drift
            one.run()
    rows = [one.row(plain.outputs) for one in contenders]
    measured = {"repeats": flags.repeats, "prefill_seconds": round(prefill_seconds, 2), "rows": rows}
    publish(flags.output.output, record.record_of("gamma_cell", session, measured, without=("gamma", "draft_budget")))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
