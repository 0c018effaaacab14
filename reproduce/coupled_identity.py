"""One coupled sample, many ways to decode it: drafters, gammas, budgets, row orders, batch sizes.

    python reproduce/coupled_identity.py --output reproduce/results/coupled_identity.jsonl

Rows of different prompt lengths are sampled once without a draft; every other way has to emit the same
tokens. Prints a table and appends one record per way; exit code 1 if a row differs. In bfloat16 rows may
differ at near-ties: reproduce/certify.py tells those from errors.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from engine.bench.flag_names import flags_named
from engine.bench.setup import Setup, prepare

from common.errors import ConfigError, UserError
from common.exit import exit_on_user_error
from common.jsonl import append_or_put_off, publish
from common.provenance import provenance
from common.say import dtype_name, say
from engine import GenerateOutput, ModelRunner, NGram, SavedText, SelfSpeculation, generate
from engine.bench import arguments, settings
from engine.bench import record as report
from engine.drafters import Drafter
from kv_cache import FullKVCache, StreamingKVCache

SHORTER_BY = 37  # tokens, from each row to the next
MAX_GAMMA, N_SINK = 5, 4
# Behind the sinks there is room for one verification block.
LEAST_BUDGET = N_SINK + MAX_GAMMA + 1
# What a benchmark's flags are called here.
OWN_FLAGS = {"draft_budget": "budgets"}


@dataclasses.dataclass(frozen=True)
class Way:
    """A drafter, the order in which the prompts are handed in, and how many rows are decoded together."""

    name: str
    make_drafter: Callable[[ModelRunner], Drafter | None]
    order: list[int]
    batch: int


def ways(setup: Setup, baseline: GenerateOutput, budgets: list[int]) -> list[Way]:
    """What has to give the baseline's tokens. A prompt's place is also its request id."""
    batch, given = setup.args.B, list(range(len(setup.prompts)))

    def streaming(gamma: int, budget: int) -> Callable[[ModelRunner], Drafter]:
        def make(runner: ModelRunner) -> Drafter:
            dtype = (setup.draft_model or runner.model).dtype
            cache = StreamingKVCache(runner.model.config, runner.cache.max_batch, budget, N_SINK, runner.device, dtype)
            return SelfSpeculation(runner, cache, gamma, setup.draft_model)

        return make

    def oracle(runner: ModelRunner) -> Drafter:
        return SavedText(runner, dict(enumerate(baseline.tokens)), MAX_GAMMA)

    def ngram(gamma: int) -> Callable[[ModelRunner], Drafter]:
        return lambda runner: NGram(runner, gamma)

    found = [
        Way(f"self, gamma {gamma}, budget {budget}", streaming(gamma, budget), given, batch)
        for gamma in (1, 3, 5)
        for budget in budgets
    ]
    found += [Way(f"n-gram, gamma {gamma}", ngram(gamma), given, batch) for gamma in (1, 5)]
    half = max(1, batch // 2)
    return [
        *found,
        Way("oracle, gamma 5", oracle, given, batch),
        Way("rows reversed, self, gamma 3", streaming(3, budgets[-1]), given[::-1], batch),
        Way("rows rotated, no draft", lambda runner: None, given[1:] + given[:1], batch),
        Way(f"rows at a time: {half}, n-gram, gamma 3", ngram(3), given, half),
    ]


def decode(setup: Setup, runner: ModelRunner, drafter: Drafter | None, order: list[int]) -> GenerateOutput:
    return generate(
        runner,
        [setup.prompts[i] for i in order],
        max_new_tokens=setup.args.gen_len,
        drafter=drafter,
        sampling=setup.sampling.params,
        verification=setup.sampling.mode,
        stop_tokens=setup.stop_tokens,
        request_ids=order,
    )


def run_way(setup: Setup, way: Way, baseline: GenerateOutput) -> dict[str, Any]:
    """Decode that way; the record of how it compares with the baseline."""
    runner = setup.runner
    if way.batch != runner.cache.max_batch:
        cache = FullKVCache(
            runner.model.config, way.batch, runner.cache.capacity, runner.device, runner.cache.keys.dtype
        )
        runner = ModelRunner(runner.model, cache)
    out = decode(setup, runner, way.make_drafter(runner), way.order)
    tokens = [out.tokens[way.order.index(i)] for i in range(len(way.order))]
    params, counts = setup.sampling.params, out.stats.counts
    record = {
        "benchmark": "coupled_identity",
        "model": setup.name,
        "dtype": dtype_name(setup.dtype),
        "way": way.name,
        "B": way.batch,
        "prompt_lengths": [len(prompt) for prompt in setup.prompts],
        "gen_len": setup.args.gen_len,
        "verification": setup.sampling.mode,
        **dataclasses.asdict(params),
        "identical_sequences": report.identical_rows(tokens, baseline.tokens),
        "sequences": len(tokens),
        "tokens_sha256": report.tokens_sha256(tokens),
        "acceptance_rate": counts.acceptance_rate,
        "mean_accepted_length": counts.mean_accepted_length,
        **provenance(),
    }
    return report.rounded(record)


def checked(args: argparse.Namespace) -> tuple[settings.Sampling, settings.DraftSettings]:
    """The flags, checked; the draft settings are those of the largest drafts that any way makes."""
    sampling = settings.sampling_settings(args)
    if not sampling.reproducible:
        raise ConfigError(
            "samples of this mode depend on the drafter, by design",
            where="--verification",
            seen=sampling.mode,
            required="coupled, or greedy at temperature 0",
            fix="use --verification coupled",
        )
    if args.save_rows is not None:
        raise ConfigError(
            "rows are compared here, not kept",
            where="--save_rows",
            seen=args.save_rows,
            required="no --save_rows",
            fix="leave it out; tests/selfspec_benchmark.py keeps rows",
        )
    settings.require_at_least("budgets", min(args.budgets), LEAST_BUDGET)
    dtype = settings.resolve_draft_dtype(args, "auto")
    largest = max(args.budgets)
    draft = settings.DraftSettings("self", MAX_GAMMA, policy="streaming", capacity=largest, n_sink=N_SINK, dtype=dtype)
    return sampling, draft


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 512], help="KV budgets of the draft")
    parser.set_defaults(B=4, prefix_len=2000, temperature=0.6, seed=7, verification="coupled")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with flags_named(OWN_FLAGS):
        setup = prepare(args, *checked(args))
    lengths = [max(2, args.prefix_len - SHORTER_BY * row) for row in range(len(setup.prompts))]
    prompts = [prompt[:length] for prompt, length in zip(setup.prompts, lengths, strict=True)]
    setup = dataclasses.replace(setup, prompts=prompts)
    say("plain decoding")
    baseline = decode(setup, setup.runner, None, list(range(len(prompts))))
    put_off: list[UserError] = []
    lines, records = ["| way | identical rows | acceptance | tokens per round |", "|---|---|---|---|"], []
    for way in ways(setup, baseline, args.budgets):
        record = run_way(setup, way, baseline)
        append_or_put_off(args.output, record, put_off)
        records.append(record)
        same, rate = f"{record['identical_sequences']} of {record['sequences']}", record["acceptance_rate"]
        shown = "-" if rate is None else rate
        lines.append(f"| {way.name} | {same} | {shown} | {record['mean_accepted_length']} |")
        say(f"{way.name}: {same} rows identical")
    differing = sum(record["sequences"] - record["identical_sequences"] for record in records)
    summary = {"benchmark": "coupled_identity", "ways": len(records), "rows_that_differ": differing}
    publish(None, summary, *lines, put_off=put_off)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    exit_on_user_error(main)
