"""The command line of the cost model: measures a grid, predicts, and prints what pays best, with a heat map."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish
from common.provenance import provenance
from engine.acceptance import AcceptanceRate
from engine.bench import arguments, settings
from engine.bench.cost_grid import ACCEPTANCE_GAMMA, Draft, measure_acceptance, measure_grid, prepare_largest
from engine.bench.flag_names import flags_named
from engine.bench.record import settings_record
from engine.cost_model.costs import CostGrid, tokens_per_round

# What the acceptance is measured on: rows of text, and tokens of each.
ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS = 4, 96
# Settings that a grid has several of.
VARIED = ("gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")
# The least that each list of sizes may hold.
LEAST = {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}
SHADES = " .:-=+*#%@"
NOISE = "within noise: closer than one standard error of acceptance moves them; the noise of the costs is not in it"

# The acceptance of every draft, by context (tokens).
Acceptances = Mapping[int, Mapping[Draft, AcceptanceRate]]


@dataclass(frozen=True)
class Prediction:
    """The predicted speedup of one choice at a batch and a context; no draft and gamma 0 for plain decoding.

    error: how far one standard error of the draft's acceptance moves it. That of the costs is not in it.
    """

    draft: Draft | None
    gamma: int
    speedup: float
    error: float


NO_DRAFT = Prediction(draft=None, gamma=0, speedup=1.0, error=0.0)


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


def best_of(
    grid: CostGrid, batch: int, context: int, acceptances: Acceptances, gammas: Sequence[int]
) -> dict[str, object]:
    """The draft and gamma with the largest predicted speedup; gamma 0 and no draft where plain decoding is faster.

    `within_noise_of`: the best of the other choices that acceptance does not tell from it, or None.
    """
    drafted = (predict(grid, batch, context, draft, acceptances, gamma) for draft in grid.drafts for gamma in gammas)
    best, *others = sorted([NO_DRAFT, *drafted], key=lambda choice: choice.speedup, reverse=True)
    near = next((other for other in others if is_within_noise(best, other)), None)
    return {**_choice_record(best), "within_noise_of": near and _choice_record(near)}


def predict(grid: CostGrid, batch: int, context: int, draft: Draft, acceptances: Acceptances, gamma: int) -> Prediction:
    """From the draft's acceptance at that context, which is one of those that acceptance was measured at."""
    costs, acceptance = grid.at(batch, context, draft), acceptances[context][draft]
    speedup = costs.speedup(tokens_per_round(acceptance.value, gamma), gamma)
    return Prediction(draft, gamma, speedup, error=costs.speedup(acceptance.tokens_error(gamma), gamma))


def is_within_noise(one: Prediction, other: Prediction) -> bool:
    """Whether two choices differ by less than one standard error of acceptance moves their difference.

    The gammas of one draft move together, by its one acceptance; those of two drafts are taken as independent.
    """
    if one.draft == other.draft:
        noise = abs(one.error - other.error)
    else:
        noise = math.hypot(one.error, other.error)
    return abs(one.speedup - other.speedup) < noise


def _choice_record(choice: Prediction) -> dict[str, object]:
    policy, budget = choice.draft or (None, None)
    speedup = round(choice.speedup, 4)
    return {"draft_policy": policy, "draft_budget": budget, "gamma": choice.gamma, "predicted_speedup": speedup}


def acceptance_record(drafts: Sequence[Draft], acceptances: Acceptances) -> dict[str, object]:
    """For a JSON record: rates and judged drafts `[D][S]`, by draft and context; no counts where rates were given."""
    rows = [[at_context[draft] for at_context in acceptances.values()] for draft in drafts]
    judged = [[acceptance.n for acceptance in row] for row in rows]
    return {
        "acceptance_rates_by_context": [[round(acceptance.value, 4) for acceptance in row] for row in rows],
        "acceptance_judged_by_context": None if None in judged[0] else judged,
    }


def acceptance_table(drafts: Sequence[Draft], acceptances: Acceptances) -> str:
    """Measured acceptance with its standard error (see `AcceptanceRate`): a line per draft and context."""
    lines = [
        "acceptance, and its standard error if drafts were independent: a lower bound",
        f"{'draft':<16}{'context':>9}{'acceptance':>16}{'judged':>9}",
    ]
    for draft in drafts:
        for context, at_context in acceptances.items():
            acceptance = at_context[draft]
            rate = f"{acceptance.value:.3f} ± {acceptance.standard_error:.3f}"
            lines.append(f"{_draft_name(*draft):<16}{context:>9}{rate:>16}{acceptance.n:>9}")
    return "\n".join(lines)


def _draft_name(policy: object, budget: object) -> str:
    return f"{policy} {budget}"


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


def heat_map(grid: CostGrid, draft: Draft, acceptances: Acceptances, gammas: Sequence[int]) -> str:
    """Predicted speedups of one draft: a line per batch and context, a column per gamma, darker where larger."""
    lines = [
        f"predicted speedup, {_draft_name(*draft)} (darker is larger; below 1 plain decoding wins)",
        f"{'B':>4}{'context':>9}{'acceptance':>12}" + "".join(f"{f'g={gamma}':>9}" for gamma in gammas),
    ]
    for batch in grid.batches:
        for context in grid.contexts:
            choices = [predict(grid, batch, context, draft, acceptances, gamma) for gamma in gammas]
            cells = (f"{_shade(choice.speedup)} {choice.speedup:.2f}" for choice in choices)
            rate = f"{acceptances[context][draft].value:.3f}"
            lines.append(f"{batch:>4}{context:>9}{rate:>12}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _shade(speedup: float) -> str:
    """Two characters: blank at 0.5 and below, black at 2 and above."""
    place = round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))
    return 2 * SHADES[place]


def best_table(best: Sequence[Mapping[str, object]]) -> str:
    """What pays best at each batch and context, from the rows of `best_of`; and what it may be no better than."""
    lines = ["what pays best", f"{'B':>4}{'context':>9}  draft"]
    for row in best:
        draft = (
            f"{_choice_name(row)}: {row['predicted_speedup']:.2f}" if row["gamma"] else "none: plain decoding is faster"
        )
        near = row["within_noise_of"]
        remark = f" (within noise of {_choice_name(near)})" if isinstance(near, Mapping) else ""
        lines.append(f"{row['B']:>4}{row['prefix_len']:>9}  {draft}{remark}")
    if any(row["within_noise_of"] for row in best):
        lines.append(NOISE)
    return "\n".join(lines)


def _choice_name(choice: Mapping[str, object]) -> str:
    if not choice["gamma"]:
        return "plain decoding"
    return f"{_draft_name(choice['draft_policy'], choice['draft_budget'])}, gamma {choice['gamma']}"
