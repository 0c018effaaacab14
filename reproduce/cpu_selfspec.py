"""Self-speculation against plain decoding on a CPU: interleaved pairs from one prefilled state, medians.

    python reproduce/cpu_selfspec.py --output reproduce/results/cpu_selfspec.jsonl

Every (gamma, budget, draft dtype, draft weights, way) cell appends one record per pair, then all cells one summary
each. The ways are what a run does without flags, with --compile also compiled, with --eager also PyTorch's own
pointwise functions; each is measured beside a baseline of its own way.
"""

import copy
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import append_or_put_off, publish
from common.provenance import provenance
from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.bench.setup import Setup, load_draft_model, make_drafter, prepare
from engine.noise import Source, compiled_source, in_passes
from engine.timing import PhaseTimer
from models import Transformer
from models.pointwise import EAGER, Pointwise, compiled, use_pointwise
from models.pointwise_cpp import pointwise_beside
from models.quantize import SCHEMES

USUAL, COMPILED, IN_EAGER = "usual", "compiled", "eager"
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


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to draft; `weights` as --draft_weights, `way` how pointwise functions run."""

    gamma: int
    budget: int
    draft_dtype: str
    weights: str
    way: str


def cell_setup(setup: Setup, cell: Cell, models: dict[tuple, Transformer | None]) -> Setup:
    """The same target, cache and prompts under another way to draft; `models` keeps what drafts, by its form."""
    args = copy.copy(setup.args)
    args.gamma, args.streamingllm_budget, args.draft_dtype = cell.gamma, cell.budget, cell.draft_dtype
    args.draft_weights, args.compile = cell.weights, cell.way == COMPILED
    draft = settings.draft_settings(args)
    form = draft.dtype, draft.quantize
    if form not in models:
        models[form] = load_draft_model(setup.runner.model, setup.target, setup.target_ranks, draft, args)
    return dataclasses.replace(setup, args=args, draft=draft, draft_model=models[form])


def use_functions(setup: Setup, pointwise: Pointwise, source: Source) -> None:
    setup.runner.noise_source = source
    for model in filter(None, (setup.runner.model, setup.draft_model)):
        use_pointwise(model, pointwise)


def summarise(records: list[dict]) -> dict:
    """Medians over the pairs of one cell, the settings they share, and every pair's speedup."""
    settings = ("model", "B", "prefix_len", "gen_len", "verification", "temperature", "draft", "gamma")
    settings += ("draft_policy", "draft_budget", "n_sink", "draft_dtype", "draft_weights", "attention", "pointwise")
    settings += ("compile",)
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


def _once(given: list | None, usual: Any) -> list:
    """Every value that was given once, or the usual one."""
    return list(dict.fromkeys(given or [usual]))


def main() -> None:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    parser.add_argument("--gammas", type=int, nargs="+", help="draft lengths to compare (default: --gamma)")
    parser.add_argument("--budgets", type=int, nargs="+", help="budgets to compare (default: --streamingllm_budget)")
    parser.add_argument(
        "--draft_dtypes",
        nargs="+",
        choices=["same", *settings.DTYPES],
        help="draft dtypes to compare (default: --draft_dtype)",
    )
    parser.add_argument(
        "--weights", nargs="+", choices=["same", *SCHEMES], help="draft weights to compare (default: --draft_weights)"
    )
    parser.add_argument("--eager", action="store_true", help="also with PyTorch's own pointwise functions")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved repetitions of every cell")
    parser.set_defaults(prefix_len=7500, device="cpu", no_baseline=False)
    args = parser.parse_args()
    settings.require_at_least("pairs", args.pairs, 1)
    settings.require_at_least("gammas", min(args.gammas or [0]), 0)
    gammas, budgets = _once(args.gammas, args.gamma), _once(args.budgets, args.streamingllm_budget)
    draft_dtypes, weights = _once(args.draft_dtypes, args.draft_dtype), _once(args.weights, args.draft_weights)
    ways = [USUAL, *([COMPILED] if args.compile else []), *([IN_EAGER] if args.eager else [])]

    args.draft_dtype, args.compile = draft_dtypes[-1], False
    args.gamma, args.streamingllm_budget = max(gammas), max(budgets)
    draft = settings.draft_settings(args)
    if draft.automatic:
        raise ConfigError(
            "fixed drafts are compared here",
            where="--gamma, --draft_budget",
            seen=settings.AUTO,
            required="numbers",
            fix="compare auto with them by reproduce/gamma_cell.py",
        )
    setup = prepare(args, settings.sampling_settings(args), draft)
    models: dict[tuple, Transformer | None] = {}
    cells = [Cell(*values) for values in itertools.product(gammas, budgets, draft_dtypes, weights, ways)]
    setups = {cell: cell_setup(setup, cell, models) for cell in cells}
    usual = pointwise_beside(setup.runner.model.backend)
    functions = {USUAL: (usual, in_passes), IN_EAGER: (EAGER, in_passes)}
    functions |= {COMPILED: (compiled(), compiled_source())} if COMPILED in ways else {}
    prefill_seconds = benchmark.prefill(setup)
    records: dict[Cell, list[dict]] = {cell: [] for cell in cells}
    for pair, way in itertools.product(range(args.pairs), ways):
        plain = dataclasses.replace(setup, args=next(s.args for c, s in setups.items() if c.way == way))
        use_functions(plain, *functions[way])
        if pair == 0:
            benchmark.warm_up(plain)
        baseline = benchmark.decode(plain, f"baseline {pair}")
        for cell in (cell for cell in cells if cell.way == way):
            own = setups[cell]
            use_functions(own, *functions[way])
            drafter = make_drafter(own, baseline)
            if pair == 0:
                benchmark.warm_up(own, [drafter])
            timer = PhaseTimer(own.runner.device)
            speculative = benchmark.decode(own, f"gamma {drafter.gamma}", drafter, timer)
            # On a CPU a phase needs no synchronisation, so timing it costs nothing.
            passes = benchmark.Passes(prefill_seconds, baseline, speculative, (timer, speculative))
            record = report.make_record("cpu_selfspec", own, passes)
            records[cell].append(record)
            append_or_put_off(args.output, record, setup.put_off)
    *others, last = [report.rounded(summarise(kept)) for kept in records.values()]
    for summary in others:
        append_or_put_off(args.output, summary, setup.put_off)
    publish(args.output, last, *map(json.dumps, others), put_off=setup.put_off)


if __name__ == "__main__":
    exit_on_user_error(main)
