"""The command line of the cost model: measures a grid, predicts, and prints what pays best, with a heat map."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from engine import arguments, settings
from engine.cost_model import CostGrid, tokens_per_round
from engine.measure_grid import Draft, measure_acceptance, measure_grid, prepare_largest
from engine.provenance import append_record, provenance
from engine.report import settings_record
from kv_cache.errors import ConfigError, exit_on_user_error

# What the acceptance is measured on: rows of text, and tokens of each.
ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS = 4, 96
# Settings that a grid has several of.
VARIED = ("gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")
SHADES = " .:-=+*#%@"


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
    add("--acceptance_rows", type=int, default=ACCEPTANCE_ROWS, help="rows of text that it is measured on")
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
    setup = prepare_largest(args, drafts, rows, args.contexts, gamma)
    alphas = dict.fromkeys(drafts, args.alpha)
    if args.alpha is None:
        alphas = measure_acceptance(setup, args, drafts, max(args.contexts), args.acceptance_rows, gamma)
    grid = measure_grid(setup, args.batches, args.contexts, drafts, args.gammas)
    best = [
        {"B": batch, "prefix_len": context, **best_of(grid, batch, context, alphas, args.gammas)}
        for batch in grid.batches
        for context in grid.contexts
    ]
    print(f"\n{cost_table(grid)}\n")
    for draft in grid.drafts:
        print(f"{heat_map(grid, draft, alphas[draft], args.gammas)}\n")
    print(f"{best_table(best)}\n")
    record = {
        "benchmark": "cost_model",
        "model": setup.name,
        "load_format": args.load_format,
        **{name: value for name, value in settings_record(setup).items() if name not in VARIED},
        **grid_record(grid),
        "acceptance_rates": [alphas[draft] for draft in grid.drafts],
        "acceptance_of": "given"
        if args.alpha is not None
        else f"the data set's own text behind {max(args.contexts)} tokens",
        "best": best,
        **provenance(),
    }
    append_record(args.output, record)
    print(json.dumps(record), flush=True)


def check(args: argparse.Namespace) -> None:
    """Errors: ConfigError for a list with a number too small, and for random weights without --alpha."""
    least = {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}
    settings.require_at_least("acceptance_rows", args.acceptance_rows, 1)
    settings.require_at_least("gen_len", args.gen_len, max(args.gammas) + 2)
    for name, minimum in least.items():
        settings.require_at_least(name, min(getattr(args, name)), minimum)
        setattr(args, name, sorted(set(getattr(args, name))))
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


def best_of(
    grid: CostGrid, batch: int, context: int, alphas: Mapping[Draft, float], gammas: Sequence[int]
) -> dict[str, object]:
    """The draft and gamma with the largest predicted speedup; gamma 0 and no draft where plain decoding is faster."""
    found = {draft: grid.at(batch, context, draft).best_gamma(alphas[draft], gammas) for draft in grid.drafts}
    policy, budget = max(found, key=lambda draft: found[draft][1])
    gamma, speedup = found[policy, budget]
    if speedup <= 1:
        return {"draft_policy": None, "draft_budget": None, "gamma": 0, "predicted_speedup": 1.0}
    return {"draft_policy": policy, "draft_budget": budget, "gamma": gamma, "predicted_speedup": round(speedup, 4)}


def grid_record(grid: CostGrid) -> dict[str, object]:
    """The measured grid, for a JSON record."""
    return {
        "batches": grid.batches,
        "contexts": grid.contexts,
        "gammas": grid.gammas,
        "drafts": [{"draft_policy": policy, "draft_budget": budget} for policy, budget in grid.drafts],
        **{f"{name}_ms": getattr(grid, name).round(4).tolist() for name in ("plain", "verify", "draft", "other")},
    }


def cost_table(grid: CostGrid) -> str:
    """Milliseconds of plain steps, and verifications and draft steps as shares of them."""
    budgets = sorted({budget for _, budget in grid.drafts})
    draft_of = {budget: next(i for i, (_, b) in enumerate(grid.drafts) if b == budget) for budget in budgets}
    head = [f"{'B':>4}{'context':>9}{'plain ms':>10}"]
    head += [f"{f'verify g={gamma}':>12}" for gamma in grid.gammas]
    head += [f"{f'draft b={budget}':>14}" for budget in budgets]
    lines = ["costs; verification and draft step in plain steps", "".join(head)]
    for i, batch in enumerate(grid.batches):
        for j, context in enumerate(grid.contexts):
            plain = grid.plain[i, j]
            line = f"{batch:>4}{context:>9}{plain:>10.1f}"
            line += "".join(f"{ms / plain:>12.2f}" for ms in grid.verify[i, j])
            line += "".join(f"{grid.draft[i, j, draft_of[budget]] / plain:>14.2f}" for budget in budgets)
            lines.append(line)
    return "\n".join(lines)


def heat_map(grid: CostGrid, draft: Draft, alpha: float, gammas: Sequence[int]) -> str:
    """Predicted speedups of one draft: a line per batch and context, a column per gamma, darker where larger."""
    policy, budget = draft
    lines = [
        f"predicted speedup, {policy} {budget}, acceptance {alpha:.3f} (darker is larger; below 1 plain decoding wins)",
        f"{'B':>4}{'context':>9}" + "".join(f"{f'g={gamma}':>9}" for gamma in gammas),
    ]
    for batch in grid.batches:
        for context in grid.contexts:
            costs = grid.at(batch, context, draft)
            speedups = [costs.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in gammas]
            cells = (f"{_shade(speedup)} {speedup:.2f}" for speedup in speedups)
            lines.append(f"{batch:>4}{context:>9}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _shade(speedup: float) -> str:
    """Two characters: blank at 0.5 and below, black at 2 and above."""
    place = round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))
    return 2 * SHADES[place]


def best_table(best: Sequence[Mapping[str, object]]) -> str:
    """What pays best at each batch and context."""
    lines = ["what pays best", f"{'B':>4}{'context':>9}  draft"]
    for row in best:
        draft = "none: plain decoding is faster"
        if row["gamma"]:
            draft = f"{row['draft_policy']} {row['draft_budget']}, gamma {row['gamma']}: {row['predicted_speedup']}"
        lines.append(f"{row['B']:>4}{row['prefix_len']:>9}  {draft}")
    return "\n".join(lines)
