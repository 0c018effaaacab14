"""Self-speculation against plain decoding on a CPU: interleaved pairs from one prefilled state, medians.

    python reproduce/cpu_selfspec.py --output reproduce/results/cpu_selfspec.jsonl

Every (gamma, budget, draft dtype) cell appends one record per pair, then all cells one summary each.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report
from engine.provenance import append_record, provenance
from engine.setup import Setup, load_draft_model, make_drafter, prepare
from engine.timing import PhaseTimer
from kv_cache.errors import exit_on_user_error

MEDIANS = (
    "speedup",
    "wall_speedup",
    "baseline_tokens_per_second",
    "decode_tokens_per_second",
    "baseline_step_ms",
    "round_ms",
    "draft_step_ms",
    "verify_step_ms",
    "acceptance_rate",
    "mean_accepted_length",
    "identical_sequences",
)


def cell_setup(setup: Setup, gamma: int, budget: int, draft_dtype: str) -> Setup:
    """The same model, cache and prompts under another gamma, draft budget and draft dtype."""
    args = copy.copy(setup.args)
    args.gamma, args.streamingllm_budget, args.draft_dtype = gamma, budget, draft_dtype
    draft, model = arguments.draft_settings(args), setup.draft_model
    if setup.draft is None or draft.dtype != setup.draft.dtype:
        model = load_draft_model(setup.runner.model, setup.target, setup.target_ranks, draft, args.attention)
    return dataclasses.replace(setup, draft=draft, draft_model=model)


def summarise(records: list[dict]) -> dict:
    """Medians over the pairs of one cell, the settings they share, and every pair's speedup."""
    settings = ("model", "B", "prefix_len", "gen_len", "verification", "temperature", "draft", "gamma")
    settings += ("draft_policy", "draft_budget", "n_sink", "draft_dtype")
    return {
        "benchmark": "cpu_selfspec_summary",
        **{key: records[0][key] for key in settings},
        "sequences": records[0]["sequences"],
        "pairs": len(records),
        "median": {key: _median([record[key] for record in records]) for key in MEDIANS},
        "speedups": [record["speedup"] for record in records],
        "peak_memory_bytes": records[-1]["peak_memory_bytes"],
        **provenance(),
    }


def _median(values: list) -> float | None:
    """None where a cell does not have the figure, such as a draft step at gamma 0."""
    return None if None in values else median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    parser.add_argument("--gammas", type=int, nargs="+", help="draft lengths to compare (default: --gamma)")
    parser.add_argument("--budgets", type=int, nargs="+", help="budgets to compare (default: --streamingllm_budget)")
    parser.add_argument(
        "--draft_dtypes",
        nargs="+",
        choices=["same", *arguments.DTYPES],
        help="draft dtypes to compare (default: --draft_dtype)",
    )
    parser.add_argument("--pairs", type=int, default=5, help="interleaved repetitions of every cell")
    parser.set_defaults(prefix_len=7500, device="cpu", no_baseline=False)
    args = parser.parse_args()
    gammas, budgets = args.gammas or [args.gamma], args.budgets or [args.streamingllm_budget]
    draft_dtypes = args.draft_dtypes or [args.draft_dtype]

    args.draft_dtype = draft_dtypes[-1]
    args.gamma, args.streamingllm_budget = max(gammas), max(budgets)
    setup = prepare(args, arguments.sampling_settings(args), arguments.draft_settings(args))
    cells = [cell_setup(setup, *cell) for cell in itertools.product(gammas, budgets, draft_dtypes)]
    prefill_seconds = benchmark.prefill(setup)
    records: list[list[dict]] = [[] for _ in cells]
    for pair in range(args.pairs):
        baseline = benchmark.decode(setup, f"baseline {pair}")
        for cell, kept in zip(cells, records, strict=True):
            drafter = make_drafter(cell, baseline)
            timer = PhaseTimer(cell.runner.device)
            speculative = benchmark.decode(cell, f"gamma {drafter.gamma}", drafter, timer)
            # On a CPU a phase needs no synchronisation, so timing it costs nothing.
            passes = benchmark.Passes(prefill_seconds, baseline, speculative, (timer, speculative))
            record = report.make_record("cpu_selfspec", cell, passes)
            kept.append(record)
            append_record(args.output, record)
    for kept in records:
        summary = report.rounded(summarise(kept))
        append_record(args.output, summary)
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    exit_on_user_error(main)
