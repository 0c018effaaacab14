"""How many drafts are accepted, by policy and budget, on three kinds of text from one prefilled state.

    python reproduce/acceptance.py --B 8 --prefix_len 7500 --policies streaming snapkv --budgets 64 128 256 512

greedy: what the target writes at temperature 0, which loops sooner or later, and a loop is easy to draft;
sampled: what it writes at --temperature; book: the data set's own text behind each prompt, teacher-forced. The
share of distinct 4-grams says how much a text repeats itself. The record is the last line of standard output.
"""

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report, settings
from engine.data import load_books, make_prompts
from engine.provenance import append_record, provenance, require_appendable
from engine.say import dtype_name, say
from engine.setup import Setup, make_drafter, prepare
from engine.stats import Counts, total
from engine.teacher_forcing import forced_acceptance
from kv_cache.errors import ConfigError, exit_on_user_error
from reproduce.variants import forget, under

TEXTS = ("greedy", "sampled", "book")
DEFAULT_TEMPERATURE = 0.6


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__, formatter_class=arguments.HelpFormatter)
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    add = parser.add_argument
    add("--draft_model", help="a standalone draft's converted checkpoint (default: the target drafts for itself)")
    add("--policies", nargs="+", choices=settings.POLICIES, default=["streaming", "snapkv"], help="cache policies")
    add("--budgets", type=int, nargs="+", default=[128, 512], help="KV entries per row, for all but full")
    add("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="what is drafted")
    parser.set_defaults(temperature=DEFAULT_TEMPERATURE, no_baseline=True, benchmark=False)
    # Of the flags that one run of a benchmark has, those that are lists here.
    parser.set_defaults(draft_positions=None, draft_ranks=None)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    given = copy.copy(args)
    require_appendable(args.output)
    _check(args)
    variants = [(policy, budget) for policy in args.policies if policy != "full" for budget in args.budgets]
    variants += [("full", None)] if "full" in args.policies else []
    # The largest draft first, so that what does not fit is found before anything is loaded.
    variants.sort(key=lambda variant: variant[1] or sys.maxsize, reverse=True)
    for name, value in _flags(args, *variants[0]).items():
        setattr(args, name, value)
    standalone = args.draft_model is not None
    draft = settings.standalone_settings(args) if standalone else settings.draft_settings(args)
    setup = prepare(args, settings.sampling_settings(args), draft)
    setup, continuations = _with_continuations(setup)
    prefill_seconds = benchmark.prefill(setup)
    rows = []
    for policy, budget in variants:
        for text in args.texts:
            temperature = args.temperature if text == "sampled" else 0.0
            one = under(setup, temperature=temperature, **_flags(given, policy, budget))
            rows.append(_measured(one, text, continuations))
            say(_line(rows[-1]))
    record = {
        "benchmark": "acceptance",
        "model": setup.name,
        "draft_model": setup.draft_source.name if setup.draft_source else None,
        "dataset": args.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        "gamma": args.gamma,
        "dtype": dtype_name(setup.dtype),
        "draft_dtype": dtype_name(draft.dtype) if draft.dtype else None,
        "draft_weights": draft.quantize,
        "attention": setup.runner.model.backend.name,
        "device": str(setup.runner.device),
        "prefill_seconds": round(prefill_seconds, 2),
        "rows": rows,
        **provenance(),
    }
    append_record(args.output, record)
    print(json.dumps(record), flush=True)


def _flags(args: argparse.Namespace, policy: str, budget: int | None) -> dict[str, object]:
    """The draft flags of one variant: sinks and window only where the policy knows them."""
    return {
        "draft_policy": policy,
        "streamingllm_budget": budget,
        "n_sink": args.n_sink if policy == "streaming" else None,
        "snapkv_window": args.snapkv_window if policy == "snapkv" else None,
    }


def _check(args: argparse.Namespace) -> None:
    if args.gamma == settings.AUTO:
        raise ConfigError(
            "acceptance is measured at one gamma",
            where="--gamma",
            seen=args.gamma,
            required="a number of drafts",
            fix="use --gamma 3",
        )
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
    books, n_token = load_books(args.dataset), args.prefix_len + args.gen_len
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
    forget(setup, drafter)
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
        "acceptance_rate": counts.acceptance_rate,
        "judged": counts.judged,
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
