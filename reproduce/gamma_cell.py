"""Speedups of fixed gammas and budgets, and of `auto`, in turn with plain decoding from one prefilled state.

    python reproduce/gamma_cell.py --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3

Every repeat, every other one in reverse order, runs plain decoding, each fixed pair, `auto`, which chooses gamma at the
largest budget, and `auto budget`, which chooses both, as `--gamma auto --draft_budget auto` does: its budgets are that
flag's own. What their rounds cost and accept was measured once before, on the same prompts, and the time of that is in
no speedup (`measured_costs_seconds`). The record is the last line of standard output;
cost_model_error.py compares it with what the cost model predicts.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report, settings
from engine.benchmark import costs_of, decode, make_pacing
from engine.cost_model import Costs
from engine.decoding import GenerateOutput
from engine.pacing import Fixed, Pacing
from engine.provenance import append_record, provenance, require_appendable
from engine.settings import DraftSettings
from engine.setup import Setup, make_drafters, prepare
from kv_cache.errors import exit_on_user_error
from reproduce.variants import under

# The ways that choose from round to round.
AUTO, AUTO_BUDGET = "auto", "auto budget"
# Settings that are each row's own.
ROW_SETTINGS = ("gamma", "draft_budget")
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
class Way:
    """One way to decode. `make` gives its pacing, for each run a new one, which chooses by `costs`."""

    name: str
    setup: Setup
    budget: int | str | None
    gamma: int | str
    make: Callable[[], Pacing]
    costs: Sequence[Costs] = ()
    cost_seconds: float | None = None

    def run(self) -> GenerateOutput:
        return decode(self.setup, self.name, pacing=self.make())


def main() -> None:
    args = make_parser().parse_args()
    check(args)
    pairs = list(itertools.product(args.budgets, args.gammas))
    automatic = {AUTO: max(args.budgets), AUTO_BUDGET: settings.AUTO}
    choices = [*pairs, *((budget, settings.AUTO) for budget in automatic.values())]
    drafts = [settings.draft_settings(settings.with_flags(args, _flags(args, *choice))) for choice in choices]
    setup = prepare(args, settings.sampling_settings(args), with_every_cache(drafts))
    prefill_seconds = benchmark.prefill(setup)
    benchmark.warm_up(setup)
    plain = Way("plain", setup, None, 0, lambda: Fixed(None))
    ways = [plain, *(_fixed(setup, args, *pair) for pair in pairs)]
    ways += [_auto(setup, args, name, budget) for name, budget in automatic.items()]
    outputs: dict[str, list[GenerateOutput]] = {way.name: [] for way in ways}
    for repeat in range(args.repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):  # against drift
            outputs[way.name].append(way.run())
    record = {
        "benchmark": "gamma_cell",
        "model": setup.name,
        "dataset": args.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        "repeats": args.repeats,
        **{name: value for name, value in report.settings_record(setup).items() if name not in ROW_SETTINGS},
        "prefill_seconds": round(prefill_seconds, 2),
        "rows": [_row(way, outputs[way.name], outputs[plain.name]) for way in ways],
        **provenance(),
    }
    append_record(args.output, record)
    print(json.dumps(record), flush=True)


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


def _fixed(setup: Setup, args: argparse.Namespace, budget: int, gamma: int) -> Way:
    own = under(setup, **_flags(args, budget, gamma))
    (drafter,) = make_drafters(own, None)
    benchmark.warm_up(own, [drafter])
    pacing = Fixed(drafter)
    return Way(f"b={budget} g={gamma}", own, budget, gamma, lambda: pacing)


def _auto(setup: Setup, args: argparse.Namespace, name: str, budget: int | str) -> Way:
    own = under(setup, **_flags(args, budget, settings.AUTO))
    drafters = make_drafters(own, None)
    benchmark.warm_up(own, drafters)
    started = time.perf_counter()
    costs = costs_of(own, drafters)
    seconds = time.perf_counter() - started
    return Way(name, own, budget, settings.AUTO, lambda: make_pacing(own, drafters, costs), costs, seconds)


def _row(way: Way, own: list[GenerateOutput], plain: list[GenerateOutput]) -> dict[str, Any]:
    """Tokens per second of every repeat; their ratios to plain decoding in the same repeat, and the ratios' median."""
    rates = [report.tokens_per_second(output) or 0.0 for output in own]
    against = [rate / (report.tokens_per_second(base) or 1.0) for rate, base in zip(rates, plain, strict=True)]
    reproducible, choices = way.setup.sampling.reproducible, [[r.choice for r in one.stats.rounds] for one in own]
    row = {
        "way": way.name,
        "draft_budget": way.budget,
        "gamma": way.gamma,
        "tokens_per_second": rates,
        "speedup": median(against),
        "speedups": against,
        "acceptance_rate": own[0].stats.counts.acceptance_rate,
        "identical_rows": min(report.identical_rows(a.tokens, b.tokens) for a, b in zip(own, plain, strict=True))
        if reproducible
        else None,
        "gammas": [[choice.gamma for choice in run] for run in choices] if way.gamma == settings.AUTO else None,
        "budgets": [[report.chosen_budget(way.setup, choice) for choice in run] for run in choices]
        if way.budget == settings.AUTO
        else None,
        "measured_costs": report.costs_record(way.setup, way.costs),
        "measured_costs_seconds": way.cost_seconds,
    }
    return report.rounded(row)


if __name__ == "__main__":
    exit_on_user_error(main)
