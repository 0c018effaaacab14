"""Speedups of fixed gammas and budgets, and of `auto`, in turn with plain decoding from one prefilled state.

    python reproduce/gamma_cell.py --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3

Every repeat, every other one in reverse order, runs plain decoding, each fixed pair, `auto`, which chooses gamma at the
largest budget, and `auto budget`, which chooses both, as `--gamma auto --draft_budget auto` does: its budgets are that
flag's own. Right before each of their runs, what their rounds cost and accept is measured anew, on the same prompts;
the time of that is in no speedup (`measured_costs_seconds`). The record is the last line of standard output;
cost_model_error.py compares it with what the cost model predicts.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.bench.flag_names import flags_named
from engine.bench.passes import costs_of, decode, make_pacing
from engine.bench.settings import DraftSettings
from engine.bench.setup import Setup, make_drafters, prepare
from engine.cost_model.costs import Costs
from engine.decoding import GenerateOutput
from engine.drafters import Drafter
from engine.stats import total
from reproduce.paper.auto_against_fixed import AUTO, AUTO_BUDGET
from reproduce.paper.variants import under

# Settings that are each row's own.
ROW_SETTINGS = ("gamma", "draft_budget")
# What a benchmark's flags of one value are called here.
OWN_FLAGS = {"gamma": "gammas", "draft_budget": "budgets"}
# The first new token is the prompt's, before any round.
LEAST_GEN_LEN = 2


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__.splitlines()[0], formatter_class=arguments.HelpFormatter)
    arguments.add_model_arguments(parser)
    arguments.add_size_arguments(parser)
    arguments.add_sampling_arguments(parser)
    add = parser.add_argument
    add("--gammas", type=int, nargs="+", default=[1, 3, 5], help="fixed gammas")
    add("--budgets", type=int, nargs="+", default=[128, 512], help="KV entries of the draft")
    add("--draft_policy", choices=["streaming", "snapkv"], default="streaming", help="what the draft's cache keeps")
    add("--repeats", type=int, default=3, help="how often all ways run, in turn")
    arguments.add_variant_arguments(parser)
    return parser


@dataclasses.dataclass(frozen=True)
class Run:
    """costs: what the run chose by, measured in `cost_seconds`; none where it had nothing to choose."""

    output: GenerateOutput
    costs: Sequence[Costs]
    cost_seconds: float


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode; without drafters, plainly."""

    name: str
    setup: Setup
    budget: int | str | None
    gamma: int | str
    drafters: Sequence[Drafter] = ()

    def run(self) -> Run:
        if not self.drafters:
            return Run(decode(self.setup, self.name), (), 0.0)
        started = time.perf_counter()
        costs = costs_of(self.setup, self.drafters)
        cost_seconds = time.perf_counter() - started
        pacing = make_pacing(self.setup, self.drafters, costs)
        return Run(decode(self.setup, self.name, pacing=pacing), costs, cost_seconds)


def main() -> None:
    args = make_parser().parse_args()
    check(args)
    pairs = list(itertools.product(args.budgets, args.gammas))
    automatic = {AUTO: max(args.budgets), AUTO_BUDGET: settings.AUTO}
    choices = [*pairs, *((budget, settings.AUTO) for budget in automatic.values())]
    with flags_named(OWN_FLAGS):
        drafts = [settings.draft_settings(settings.with_flags(args, _flags(args, *choice))) for choice in choices]
        setup = prepare(args, settings.sampling_settings(args), with_every_cache(drafts))
    prefill_seconds = benchmark.prefill(setup)
    benchmark.warm_up(setup)
    plain = Way("plain", setup, None, 0)
    ways = [plain, *(_way(setup, args, f"b={budget} g={gamma}", budget, gamma) for budget, gamma in pairs)]
    ways += [_way(setup, args, name, budget, settings.AUTO) for name, budget in automatic.items()]
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    for repeat in range(args.repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):  # against drift
            runs[way.name].append(way.run())
    record = {
        "benchmark": "gamma_cell",
        "model": setup.name,
        "dataset": setup.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        "repeats": args.repeats,
        **{name: value for name, value in report.settings_record(setup).items() if name not in ROW_SETTINGS},
        "prefill_seconds": round(prefill_seconds, 2),
        "rows": [_row(way, runs[way.name], runs[plain.name]) for way in ways],
        **provenance(),
    }
    publish(args.output, record)


def check(args: argparse.Namespace) -> None:
    """Errors: ConfigError for a number too small. Every gamma and budget counts once."""
    require_appendable(args.output)
    for name in ("gammas", "budgets"):
        settings.require_at_least(name, min(getattr(args, name)), 1)
        setattr(args, name, sorted(set(getattr(args, name))))
    settings.require_at_least("gen_len", args.gen_len, LEAST_GEN_LEN)
    settings.require_at_least("repeats", args.repeats, 1)


def with_every_cache(drafts: Sequence[DraftSettings]) -> DraftSettings:
    """What there has to be room for: the largest gamma, and the caches of all drafts, which are held at once."""
    budgets = tuple(budget for draft in drafts for budget in draft.capacities)
    gamma = max(draft.gamma for draft in drafts)
    return dataclasses.replace(drafts[0], gamma=gamma, capacity=max(budgets), budgets=budgets)


def _flags(args: argparse.Namespace, budget: int | str, gamma: int | str) -> dict[str, object]:
    return settings.variant_flags(args, args.draft_policy, budget, gamma)


def _way(setup: Setup, args: argparse.Namespace, name: str, budget: int | str, gamma: int | str) -> Way:
    own = under(setup, **_flags(args, budget, gamma))
    drafters = make_drafters(own, None)
    benchmark.warm_up(own, drafters)
    return Way(name, own, budget, gamma, drafters)


def _row(way: Way, own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Lists have one value a repeat, but `measured_costs`, which has one a drafter for each.

    speedups: to plain decoding in the same repeat; speedup: their median.
    """
    rates = list(map(_tokens_per_second, own))
    speedups = [rate / _tokens_per_second(base) for rate, base in zip(rates, plain, strict=True)]
    choices = [[round_.choice for round_ in run.output.stats.rounds] for run in own]
    same = [report.identical_rows(a.output.tokens, b.output.tokens) for a, b in zip(own, plain, strict=True)]
    row = {
        "way": way.name,
        "draft_budget": way.budget,
        "gamma": way.gamma,
        "tokens_per_second": rates,
        "speedup": median(speedups),
        "speedups": speedups,
        "acceptance_rate": total([run.output.stats.counts for run in own]).acceptance_rate,
        "identical_rows": min(same) if way.setup.sampling.reproducible else None,
        "gammas": [[choice.gamma for choice in run] for run in choices] if way.gamma == settings.AUTO else None,
        "budgets": [[report.drafting_budget(way.setup, choice) for choice in run] for run in choices]
        if way.budget == settings.AUTO
        else None,
        "measured_costs": [report.costs_record(way.setup, run.costs) for run in own] if own[0].costs else None,
        "measured_costs_seconds": [run.cost_seconds for run in own] if own[0].costs else None,
    }
    return report.rounded(row)


def _tokens_per_second(run: Run) -> float:
    rate = report.tokens_per_second(run.output)
    assert rate is not None  # LEAST_GEN_LEN
    return rate


if __name__ == "__main__":
    exit_on_user_error(main)
