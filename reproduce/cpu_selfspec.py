"""Self-speculation against plain decoding on a CPU: interleaved pairs from one prefilled state, medians.

    python reproduce/cpu_selfspec.py --output reproduce/results/cpu_selfspec.jsonl

Every (gamma, budget, draft dtype, draft weights, pointwise functions) cell appends one record per pair, then all cells
one summary each. Pointwise functions are those of a run without flags, with --compile also compiled ones, with --eager
also PyTorch's own; each cell is measured beside a baseline with the same.
"""

import itertools
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from tyro.conf import arg

import engine
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import append_or_put_off, publish
from common.provenance import provenance
from engine.bench.config import Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from engine.bench.draft_flags import draft_flags
from engine.drafters.config import DrafterConfig
from models.names import Dtype, Scheme

# Prompt tokens per row, where none are asked for.
PREFIX_LEN = 7500
SHARED = (
    *("model", "B", "prefix_len", "gen_len", "verification", "temperature", "draft", "gamma", "draft_policy"),
    *("draft_budget", "n_sink", "draft_dtype", "draft_weights", "attention", "pointwise", "compile", "sequences"),
)
MEDIANS = (
    *("speedup", "wall_speedup", "baseline_tokens_per_second", "decode_tokens_per_second", "baseline_step_ms"),
    *("round_ms", "draft_step_ms", "verify_step_ms"),
    *("acceptance_rate", "mean_accepted_length", "identical_sequences"),
)
Drafts: Any = draft_flags()
DraftDtypes = tuple[Literal["same"] | Dtype, ...]
DraftWeights = tuple[Literal["same"] | Scheme, ...]
# The lists that hold several values of an option.
LISTS = {"gamma": "gammas", "draft_budget": "budgets", "draft_dtype": "draft_dtypes", "draft_weights": "weights"}


def one_of(option: str) -> Any:
    """Of a list without which there is the option's value alone."""
    return arg(help_behavior_hint=f"(default: --{option})")


@dataclass(frozen=True)
class LongSizes(Sizes):
    """How much is decoded at once."""

    prefix_len: Annotated[int | None, arg(help_behavior_hint=f"(default: {PREFIX_LEN})")] = None
    """prompt tokens per row"""


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=lambda: Target(device="cpu"))
    text: Text = field(default_factory=Text)
    sizes: LongSizes = field(default_factory=LongSizes)
    rows: Rows = field(default_factory=Rows)
    sampling: Sampling = field(default_factory=Sampling)
    output: Output = field(default_factory=Output)
    draft: Drafts = field(default_factory=Drafts)
    gammas: Annotated[tuple[int, ...] | None, one_of("gamma")] = None  # draft lengths to compare
    budgets: Annotated[tuple[int, ...] | None, one_of("draft_budget")] = None  # budgets to compare
    draft_dtypes: Annotated[DraftDtypes | None, one_of("draft_dtype")] = None  # draft dtypes to compare
    weights: Annotated[DraftWeights | None, one_of("draft_weights")] = None  # draft weights to compare
    eager: bool = False  # also with PyTorch's own pointwise functions
    pairs: int = 5  # interleaved repetitions of every cell

    def check(self) -> None:
        require_at_least("pairs", self.pairs, 1)
        require_at_least("gammas", min(self.gammas or [0]), 0)
        given = self.draft.given()
        if "auto" in (given.get("gamma"), given.get("draft_budget")):
            where, fix = f"{flag('gamma')}, {flag('draft_budget')}", "compare auto with them by reproduce/gamma_cell.py"
            raise ConfigError("fixed drafts are compared here", where, "auto", "numbers", fix)
        for option, name in LISTS.items():
            if (several := getattr(self, name)) and option in given:
                where, fix = f"{flag(option)} and {flag(name)}", f"leave out {flag(option)}"
                seen = f"{given[option]} and {' '.join(map(str, several))}"
                raise ConfigError("one value and several were given", where, seen, "either", fix)

    def drafts(self) -> list[DrafterConfig]:
        """Each combination of what the lists hold, once."""
        given = {option: dict.fromkeys(getattr(self, name)) for option, name in LISTS.items() if getattr(self, name)}
        return self.draft.variants(*(dict(zip(given, one, strict=True)) for one in itertools.product(*given.values())))


def summarise(records: list[dict]) -> dict:
    """Medians over the pairs of one cell, the settings they share, and every pair's speedup.

    Null where a cell does not have the figure, such as a draft step at gamma 0.
    """
    seen = {key: [record[key] for record in records] for key in (*SHARED, *MEDIANS)}
    return {
        "benchmark": "cpu_selfspec_summary",
        **{key: seen[key][0] for key in SHARED},
        "pairs": len(records),
        "median": {key: None if None in seen[key] else median(seen[key]) for key in MEDIANS},
        "speedups": seen["speedup"],
        "peak_memory_bytes": records[-1]["peak_memory_bytes"],
        **provenance(),
    }


def main(flags: Flags) -> None:
    from engine.bench import passes, record
    from engine.bench.plan import resolve_several
    from engine.noise import compiled_source, in_passes
    from engine.timing import PhaseTimer
    from models.pointwise import EAGER, compiled, use_pointwise
    from models.pointwise_cpp import pointwise_beside

    flags.check()
    drafts, target, output = flags.drafts(), replace(flags.target, compile=False), flags.output.output
    own_length = flags.sizes.prefix_len is not None or flags.rows.prompts is not None
    sizes = flags.sizes if own_length else replace(flags.sizes, prefix_len=PREFIX_LEN)
    config = RunConfig(target, flags.text, sizes, flags.rows, flags.sampling, output=flags.output)
    session = engine.Session.of_plan(resolve_several(config, drafts, at_once="one"))
    # Pointwise functions and noise, those of a run without flags first, and a cell for each draft.
    plain, with_compile = ([session.variant(draft=one, compile=kind) for one in drafts] for kind in (False, True))
    kinds = [(pointwise_beside(session.runner.model.backend), in_passes, plain)]
    kinds += [(compiled(), compiled_source(), with_compile)] if flags.target.compile else []
    kinds += [(EAGER, in_passes, plain)] if flags.eager else []
    prefill_seconds = passes.prefill(session)
    records: dict[tuple[int, int], list[dict]] = {}
    for pair, (kind, (pointwise, source, cells)) in itertools.product(range(flags.pairs), enumerate(kinds)):
        session.runner.noise_source = source
        for model in (session.runner.model, *session.models.values()):
            use_pointwise(model, pointwise)
        if pair == 0:
            passes.warm_up(cells[0])
        baseline = passes.decode(cells[0], f"baseline {pair}")
        for index, cell in enumerate(cells):
            drafter = cell.drafter(texts=baseline.tokens)
            if pair == 0:
                passes.warm_up(cell, [drafter])
            speculative = passes.decode(cell, f"gamma {drafter.gamma}", drafter, PhaseTimer(cell.runner.device))
            # On a CPU a phase needs no synchronisation, so timing it costs nothing.
            made = passes.Passes(prefill_seconds, baseline, speculative, speculative)
            measured = record.make_record("cpu_selfspec", cell, made)
            records.setdefault((index, kind), []).append(measured)
            append_or_put_off(output, measured, session.put_off)
    *others, last = [record.rounded(summarise(records[cell])) for cell in sorted(records)]
    for summary in others:
        append_or_put_off(output, summary, session.put_off)
    publish(output, last, *map(json.dumps, others), put_off=session.put_off)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
