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
import sys
import time
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
    from engine.cost_model.costs import Costs

# Settings that are each row's own.
ROW_SETTINGS = ("gamma", "draft_budget")
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
    gammas: tuple[int, ...] = (1, 3, 5)
    """fixed gammas"""
    budgets: tuple[int, ...] = (128, 512)
    """KV entries of the draft"""
    draft_policy: BudgetedName = "streaming"
    """what the draft's cache keeps"""
    repeats: int = 3
    """how often all are run, interleaved"""

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
class Run:
    """costs: what the run chose by, measured in `cost_seconds`; none where it had nothing to choose."""

    output: engine.GenerateOutput
    costs: Sequence[Costs]
    cost_seconds: float


@dataclass(frozen=True)
class Contender:
    """One of what is compared; without drafters, plain decoding."""

    name: str
    session: engine.Session
    budget: int | str | None
    gamma: int | str
    drafters: Sequence[engine.Drafter] = ()

    def run(self) -> Run:
        from engine.bench.passes import costs_of, decode, make_pacing

        if not self.drafters:
            return Run(decode(self.session, self.name), (), 0.0)
        started = time.perf_counter()
        costs = costs_of(self.session, self.drafters)
        cost_seconds = time.perf_counter() - started
        pacing = make_pacing(self.session, self.drafters, costs)
        return Run(decode(self.session, self.name, pacing=pacing), costs, cost_seconds)


def main(flags: Flags) -> None:
    from engine.bench import passes, record
    from engine.bench.plan import resolve_several

    flags.check()
    chosen = flags.drafts()
    drafts = dict(zip(chosen, flags.draft.variants(*chosen.values()), strict=True))
    config = RunConfig(flags.target, flags.text, flags.sizes, sampling=flags.sampling, output=flags.output)
    session = engine.Session.of_plan(resolve_several(config, list(drafts.values())))
    prefill_seconds = passes.prefill(session)
    passes.warm_up(session)
    plain = Contender("plain", session, None, 0)
    contenders = [plain]
    for name, draft in drafts.items():
        own = session.variant(draft=draft)
        drafters = own.drafters()
        passes.warm_up(own, drafters)
        contenders.append(Contender(name, own, chosen[name]["draft_budget"], chosen[name]["gamma"], drafters))
    runs: dict[str, list[Run]] = {one.name: [] for one in contenders}
    for repeat in range(flags.repeats):
        for one in contenders if repeat % 2 == 0 else reversed(contenders):  # against drift
            runs[one.name].append(one.run())
    rows = [_row(one, runs[one.name], runs[plain.name]) for one in contenders]
    measured = {"repeats": flags.repeats, "prefill_seconds": round(prefill_seconds, 2), "rows": rows}
    publish(flags.output.output, record.record_of("gamma_cell", session, measured, ROW_SETTINGS))


def _row(one: Contender, own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Lists have one value a repeat, but `measured_costs`, which has one a drafter for each.

    speedups: to plain decoding in the same repeat; speedup: their median.
    """
    from engine.bench import record
    from engine.stats import total

    rates = list(map(_tokens_per_second, own))
    speedups = [rate / _tokens_per_second(base) for rate, base in zip(rates, plain, strict=True)]
    choices = [[round_.choice for round_ in run.output.stats.rounds] for run in own]
    same = [record.identical_rows(a.output.tokens, b.output.tokens) for a, b in zip(own, plain, strict=True)]
    row = {
        "way": one.name,
        "draft_budget": one.budget,
        "gamma": one.gamma,
        "tokens_per_second": rates,
        "speedup": median(speedups),
        "speedups": speedups,
        "acceptance_rate": total([run.output.stats.counts for run in own]).acceptance_rate,
        "identical_rows": min(same) if one.session.sampling.reproducible else None,
        "gammas": [[choice.gamma for choice in run] for run in choices] if one.gamma == AUTO else None,
        "budgets": [[record.drafting_budget(one.session, choice) for choice in run] for run in choices]
        if one.budget == AUTO
        else None,
        "measured_costs": [record.costs_record(one.session, run.costs) for run in own] if own[0].costs else None,
        "measured_costs_seconds": [run.cost_seconds for run in own] if own[0].costs else None,
    }
    return record.rounded(row)


def _tokens_per_second(run: Run) -> float:
    from engine.bench import record

    rate = record.tokens_per_second(run.output)
    assert rate is not None  # LEAST_GEN_LEN
    return rate


if __name__ == "__main__":
    cli.run_alone(main, Flags)
