"""How many drafts are accepted, by policy and budget, on three kinds of text from one prefilled state.

    python reproduce/acceptance.py --B 8 --prefix_len 7500 --policies streaming snapkv --budgets 64 128 256 512

greedy: what the target writes at temperature 0, which loops sooner or later, and a loop is easy to draft;
sampled: what it writes at --temperature; book: the data set's own text behind each prompt, teacher-forced. The
share of distinct 4-grams says how much a text repeats itself. The record is the last line of standard output.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.bench.data import make_prompts
from engine.bench.flag_names import flags_named
from engine.bench.setup import Setup, make_drafter, prepare
from engine.evaluation.teacher_forcing import forced_acceptance
from engine.stats import Counts, total
from reproduce.paper.variants import under

TEXTS = ("greedy", "sampled", "book")
DEFAULT_TEMPERATURE = 0.6
# What the benchmarks' flags are called here, and those of a standalone draft.
OWN_FLAGS = {"draft_policy": "policies", "draft_budget": "budgets"}
STANDALONE_FLAGS = {"target": "model", "model": "draft_model"}
# Settings that are each row's own.
ROW_SETTINGS = (
    "draft_policy",
    "draft_budget",
    "n_sink",
    "snapkv_window",
    "draft_positions",
    "verification",
    "temperature",
)


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__.splitlines()[0], formatter_class=arguments.HelpFormatter)
    arguments.add_model_arguments(parser)
    arguments.add_size_arguments(parser)
    arguments.add_sampling_arguments(parser)
    add = parser.add_argument
    add("--gamma", type=int, default=3, help="tokens drafted per round")
    add("--draft_model", help="a standalone draft's converted checkpoint (default: the target drafts for itself)")
    add("--policies", nargs="+", choices=settings.POLICIES, default=["streaming", "snapkv"], help="cache policies")
    add("--budgets", type=int, nargs="+", default=[128, 512], help="KV entries per row, for all but full")
    add("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="what is drafted")
    arguments.add_variant_arguments(parser)
    parser.set_defaults(temperature=DEFAULT_TEMPERATURE, draft_positions=None, draft_ranks=None)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    require_appendable(args.output)
    _check(args)
    standalone = args.draft_model is not None
    resolve = settings.standalone_settings if standalone else settings.draft_settings
    variants = [(policy, budget) for policy in args.policies if policy != "full" for budget in args.budgets]
    variants += [("full", None)] if "full" in args.policies else []
    flags = {variant: settings.variant_flags(args, *variant, args.gamma) for variant in variants}
    with flags_named(OWN_FLAGS | (STANDALONE_FLAGS if standalone else {})):
        # All of them, so that what cannot be is found before anything is loaded; the one that needs most is prepared.
        resolved = {variant: resolve(settings.with_flags(args, flags[variant])) for variant in variants}
        most = max(variants, key=lambda one: (resolved[one].policy == "snapkv", resolved[one].capacity))
        setup = prepare(settings.with_flags(args, flags[most]), settings.sampling_settings(args), resolved[most])
    setup, continuations = _with_continuations(setup)
    prefill_seconds = benchmark.prefill(setup)
    rows = []
    for variant in variants:
        for text in args.texts:
            temperature = args.temperature if text == "sampled" else 0.0
            one = under(setup, temperature=temperature, **flags[variant])
            rows.append(_measured(one, text, continuations))
            say(_line(rows[-1]))
    record = {
        "benchmark": "acceptance",
        "model": setup.name,
        "dataset": setup.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        **{name: value for name, value in report.settings_record(setup).items() if name not in ROW_SETTINGS},
        "prefill_seconds": round(prefill_seconds, 2),
        "rows": rows,
        **provenance(),
    }
    publish(args.output, record)


def _check(args: argparse.Namespace) -> None:
    settings.require_at_least("budgets", min(args.budgets), 1)
    settings.require_at_least("gamma", args.gamma, 1)
    settings.require_at_least("gen_len", args.gen_len, args.gamma + 2)
    if args.load_format == "dummy":
        raise ConfigError(
            "random weights have no acceptance",
            where="--load_format",
            seen="dummy",
            required="a trained model",
            fix="leave out --load_format",
        )
    if args.temperature == 0 and "sampled" in args.texts:
        raise ConfigError(
            "sampled text needs a temperature",
            where="--temperature with --texts sampled",
            seen=0.0,
            required="> 0",
            fix="leave out --temperature, or name --texts greedy book",
        )


def _with_continuations(setup: Setup) -> tuple[Setup, list[list[int]]]:
    """Prompts that the data set goes on behind, and what it goes on with."""
    assert setup.tokenizer is not None
    args = setup.args
    books, n_token = setup.books(), args.prefix_len + args.gen_len
    stretches = make_prompts(books, setup.tokenizer, n_prompts=args.B, prefix_len=n_token)
    prompts = [stretch[: args.prefix_len] for stretch in stretches]
    return dataclasses.replace(setup, prompts=prompts), [stretch[args.prefix_len :] for stretch in stretches]


def _measured(setup: Setup, text: str, continuations: Sequence[Sequence[int]]) -> dict:
    drafter = make_drafter(setup, None)
    if text == "book":
        counts = total(forced_acceptance(setup.runner, drafter, setup.prompts, continuations))
        written: Sequence[Sequence[int]] = continuations
    else:
        output = benchmark.decode(setup, text, drafter)
        counts, written = output.stats.counts, output.tokens
    setup.runner.drop_graphs()
    return _row(setup, text, counts, written)


def _row(setup: Setup, text: str, counts: Counts, written: Sequence[Sequence[int]]) -> dict:
    draft = setup.draft
    assert draft is not None
    row = {
        "text": text,
        "temperature": setup.sampling.params.temperature,
        "verification": setup.sampling.mode,
        "draft_policy": draft.policy,
        "draft_budget": draft.capacity if draft.policy != "full" else None,
        "n_sink": draft.n_sink,
        "snapkv_window": draft.window,
        "draft_positions": draft.positions,
        "acceptance_rate": counts.acceptance_rate,
        "judged": counts.verified,
        "acceptance_per_position": counts.acceptance_per_position,
        "mean_accepted_length": counts.mean_accepted_length,
        "distinct_4gram_fraction": report.distinct_4gram_fraction(written),
    }
    return report.rounded(row)


def _line(row: dict) -> str:
    budget = "" if row["draft_budget"] is None else f" {row['draft_budget']}"
    return (
        f"{row['text']:<8}{row['draft_policy']}{budget}: acceptance {row['acceptance_rate']:.3f} of {row['judged']}, "
        f"{row['mean_accepted_length']:.2f} tokens a round, distinct 4-grams {row['distinct_4gram_fraction']:.2f}"
    )


if __name__ == "__main__":
    exit_on_user_error(main)
