"""The command line of the cost model: measures a grid, predicts, and prints what pays best, with a heat map."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish
from common.provenance import provenance
from engine.acceptance import AcceptanceRate
from engine.bench import arguments, settings
from engine.bench.cost_grid import ACCEPTANCE_GAMMA, Draft, measure_acceptance, measure_grid, prepare_largest
from engine.bench.cost_tables import Acceptances, acceptance_table, best_of, best_table, cost_table, heat_map
from engine.bench.flag_names import flags_named
from engine.bench.record import settings_record
from engine.cost_model.costs import CostGrid

# What the acceptance is measured on: rows of text, and tokens of each.
ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS = 4, 96
# Settings that a grid has several of.
VARIED = ("gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")
# The least that each list of sizes may hold.
LEAST = {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(
        prog="python -m engine.cost_model",
        description="Measure what rounds cost on this machine, and predict what speculation gains.",
        formatter_class=arguments.HelpFormatter,
    )
    arguments.add_model_arguments(parser)
    arguments.add_sampling_arguments(parser)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 4, 8], help="rows decoded together")
    add("--contexts", type=int, nargs="+", default=[1000, 4000], help="tokens per row")
    add("--policies", nargs="+", choices=["streaming", "snapkv"], default=["streaming", "snapkv"], help="of the draft")
    add("--budgets", type=int, nargs="+", default=[64, 128, 256, 512], help="KV entries of the draft")
    add("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="tokens drafted per round")
    add("--alpha", type=float, help="acceptance rate of every draft (default: measured on the data set's own text)")
    add("--acceptance_rows", type=int, default=ACCEPTANCE_ROWS, help="rows of text it is measured on, at each context")
    add("--gen_len", type=int, default=ACCEPTANCE_TOKENS, help="tokens of each of them")
    arguments.add_variant_arguments(parser)
    parser.set_defaults(B=1, prefix_len=1)  # of the grid's cells, not of the command line
    return parser


def main() -> None:
    exit_on_user_error(_main)


def _main() -> None:
    args = make_parser().parse_args()
    check(args)
    drafts, gamma = [(policy, budget) for policy in args.policies for budget in args.budgets], max(args.gammas)
    rows = args.batches if args.alpha is not None else [*args.batches, args.acceptance_rows]
    with flags_named(own_flags(args)):
        setup = prepare_largest(args, drafts, rows, args.contexts, gamma)
    acceptances: Acceptances
    if args.alpha is not None:
        acceptances = dict.fromkeys(args.contexts, dict.fromkeys(drafts, AcceptanceRate(args.alpha)))
    else:
        acceptances = {
            context: measure_acceptance(setup, args, drafts, context, args.acceptance_rows, gamma)
            for context in args.contexts
        }
    grid = measure_grid(setup, args.batches, args.contexts, drafts, args.gammas)
    best = [
        {"B": batch, "prefix_len": context, **best_of(grid, batch, context, acceptances, args.gammas)}
        for batch in grid.batches
        for context in grid.contexts
    ]
    record = {
        "benchmark": "cost_model",
        "model": setup.name,
        "load_format": args.load_format,
        "dataset": setup.dataset if args.alpha is None else None,
        **{name: value for name, value in settings_record(setup).items() if name not in VARIED},
        **grid_record(grid),
        **acceptance_record(drafts, acceptances),
        "acceptance_of": "the data set's own text behind each context" if args.alpha is None else "given",
        "best": best,
        **provenance(),
    }
    tables = [f"\n{cost_table(grid)}"]
    if args.alpha is None:
        tables.append(acceptance_table(drafts, acceptances))
    tables += [heat_map(grid, draft, acceptances, args.gammas) for draft in grid.drafts]
    publish(args.output, record, *(f"{table}\n" for table in [*tables, best_table(best)]))


def check(args: argparse.Namespace) -> None:
    """Errors: ConfigError for a number too small, and for random weights without --alpha."""
    for name, minimum in LEAST.items():
        settings.require_at_least(name, min(getattr(args, name)), minimum)
        setattr(args, name, sorted(set(getattr(args, name))))
    settings.require_at_least("acceptance_rows", args.acceptance_rows, 1)
    if args.alpha is None:  # else no text is drafted
        settings.require_at_least("gen_len", args.gen_len, min(ACCEPTANCE_GAMMA, max(args.gammas)) + 2)
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise ConfigError(
            "an acceptance rate is a probability", where="--alpha", seen=args.alpha, required="0 to 1", fix="use 0.8"
        )
    if args.load_format == "dummy" and args.alpha is None:
        raise ConfigError(
            "random weights have no acceptance",
            where="--alpha",
            seen="not given, with --load_format dummy",
            required="an acceptance rate",
            fix="add --alpha 0.8",
        )


def own_flags(args: argparse.Namespace) -> dict[str, str]:
    """What a benchmark's flags of one value are called here, by the benchmark's names."""
    batches_are_largest = args.alpha is not None or max(args.batches) >= args.acceptance_rows
    return {
        "B": "batches" if batches_are_largest else "acceptance_rows",
        "prefix_len": "contexts",
        "gamma": "gammas",
        "draft_policy": "policies",
        "draft_budget": "budgets",
    }


def acceptance_record(drafts: Sequence[Draft], acceptances: Acceptances) -> dict[str, object]:
    """For a JSON record: rates and judged drafts `[D][S]`, by draft and context; no counts where rates were given."""
    rows = [[at_context[draft] for at_context in acceptances.values()] for draft in drafts]
    judged = [[acceptance.n for acceptance in row] for row in rows]
    return {
        "acceptance_rates_by_context": [[round(acceptance.value, 4) for acceptance in row] for row in rows],
        "acceptance_judged_by_context": None if None in judged[0] else judged,
    }


def grid_record(grid: CostGrid) -> dict[str, object]:
    """The measured grid, for a JSON record."""
    return {
        "batches": grid.batches,
        "contexts": grid.contexts,
        "gammas": grid.gammas,
        "drafts": [{"draft_policy": policy, "draft_budget": budget} for policy, budget in grid.drafts],
        **{f"{name}_ms": getattr(grid, name).round(4).tolist() for name in ("plain", "verify", "draft", "other")},
    }
