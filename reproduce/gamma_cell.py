"""Speedups of fixed gammas and budgets, and of `auto`, in turn with plain decoding from one prefilled state.

    python reproduce/gamma_cell.py --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3

Every repeat runs plain decoding, each fixed pair, and `auto`, whose costs were measured once before. The record is
the last line of standard output; cost_model_error.py compares it with what the cost model predicts.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report, settings
from engine.benchmark import costs_of, decode, make_pacing
from engine.decoding import GenerateOutput
from engine.pacing import Fixed, Pacing
from engine.provenance import append_record, provenance, require_appendable
from engine.say import dtype_name
from engine.setup import Setup, make_drafters, prepare
from kv_cache.errors import exit_on_user_error
from reproduce.variants import under

PLAIN, AUTO = "plain", "auto"


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__, formatter_class=arguments.HelpFormatter)
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    add = parser.add_argument
    add("--gammas", type=int, nargs="+", default=[1, 3, 5], help="fixed gammas")
    add("--budgets", type=int, nargs="+", default=[128, 512], help="KV entries of the draft; auto has the largest")
    add("--repeats", type=int, default=3, help="how often all ways run, in turn")
    parser.set_defaults(no_baseline=True, benchmark=False)
    return parser


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode. `make` gives its pacing, for each run a new one."""

    name: str
    setup: Setup
    budget: int | None
    gamma: int | str
    make: Any

    def run(self) -> GenerateOutput:
        return decode(self.setup, self.name, pacing=self.make())


def main() -> None:
    args = make_parser().parse_args()
    require_appendable(args.output)
    for name in ("gammas", "budgets"):
        settings.require_at_least(name, min(getattr(args, name)), 1)
    settings.require_at_least("repeats", args.repeats, 1)
    args.gamma, args.streamingllm_budget = AUTO, max(args.budgets)
    setup = prepare(args, settings.sampling_settings(args), settings.draft_settings(args))
    prefill_seconds = benchmark.prefill(setup)
    ways = [Way(PLAIN, setup, None, 0, lambda: Fixed(None)), *_fixed(setup, args), _auto(setup)]
    outputs: dict[str, list[GenerateOutput]] = {way.name: [] for way in ways}
    for _ in range(args.repeats):
        for way in ways:
            outputs[way.name].append(way.run())
    record = {
        "benchmark": "gamma_cell",
        "model": setup.name,
        "dataset": args.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        "repeats": args.repeats,
        "verification": setup.sampling.mode,
        "temperature": setup.sampling.params.temperature,
        "dtype": dtype_name(setup.dtype),
        "draft_dtype": dtype_name(setup.draft.dtype) if setup.draft and setup.draft.dtype else None,
        "draft_policy": setup.draft.policy if setup.draft else None,
        "attention": setup.runner.model.backend.name,
        "device": str(setup.runner.device),
        "prefill_seconds": round(prefill_seconds, 2),
        "rows": [_row(way, outputs) for way in ways],
        **provenance(),
    }
    append_record(args.output, record)
    print(json.dumps(record), flush=True)


def _fixed(setup: Setup, args: argparse.Namespace) -> list[Way]:
    ways = []
    for budget in args.budgets:
        for gamma in args.gammas:
            own = under(setup, streamingllm_budget=budget, gamma=gamma)
            (drafter,) = make_drafters(own, None)
            benchmark.warm_up(own, [drafter])
            pacing = Fixed(drafter)
            ways.append(Way(f"b={budget} g={gamma}", own, budget, gamma, lambda pacing=pacing: pacing))
    return ways


def _auto(setup: Setup) -> Way:
    drafters = make_drafters(setup, None)
    costs = costs_of(setup, drafters)
    benchmark.warm_up(setup, drafters)

    def fresh() -> Pacing:
        return make_pacing(setup, drafters, costs)

    assert setup.draft is not None
    return Way(AUTO, setup, setup.draft.capacity, AUTO, fresh)


def _row(way: Way, outputs: dict[str, list[GenerateOutput]]) -> dict[str, Any]:
    """Tokens per second of every repeat, and their medians' ratios to plain decoding in the same repeat."""
    own, plain = outputs[way.name], outputs[PLAIN]
    rates = [report.tokens_per_second(output) or 0.0 for output in own]
    against = [rate / (report.tokens_per_second(base) or 1.0) for rate, base in zip(rates, plain, strict=True)]
    reproducible = way.setup.sampling.reproducible
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
        "gammas": [[round_.choice.gamma for round_ in output.stats.rounds] for output in own]
        if way.gamma == AUTO
        else None,
    }
    return report.rounded(row)


if __name__ == "__main__":
    exit_on_user_error(main)
