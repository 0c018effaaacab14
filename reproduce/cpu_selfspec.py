"""Self-speculation against plain decoding on a CPU: interleaved pairs from one prefilled state, medians.

    python reproduce/cpu_selfspec.py --output reproduce/results/cpu_selfspec.jsonl

Every (gamma, budget, draft dtype, draft weights, pointwise functions) cell appends one record per pair, then all cells
one summary each. Pointwise functions are those of a run without flags, with --compile also compiled ones, with --eager
also PyTorch's own; each cell is measured beside a baseline with the same.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
from models.names import Dtype, Scheme

if TYPE_CHECKING:
    from engine.noise import Source
    from models.pointwise import Pointwise

# Prompt tokens per row, where none are asked for.
PREFIX_LEN = 7500
USUAL, COMPILED, IN_EAGER = "usual", "compiled", "eager"
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


@dataclass(frozen=True)
class Cell:
    """One draft, by its options, and how pointwise functions run."""

    options: tuple[tuple[str, Any], ...]
    functions: str


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
    gammas: Annotated[tuple[int, ...] | None, arg(help_behavior_hint="(default: --gamma)")] = None
    """draft lengths to compare"""
    budgets: Annotated[tuple[int, ...] | None, arg(help_behavior_hint="(default: --draft_budget)")] = None
    """budgets to compare"""
    draft_dtypes: Annotated[
        tuple[Literal["same"] | Dtype, ...] | None, arg(help_behavior_hint="(default: --draft_dtype)")
    ] = None
    """draft dtypes to compare"""
    weights: Annotated[
        tuple[Literal["same"] | Scheme, ...] | None, arg(help_behavior_hint="(default: --draft_weights)")
    ] = None
    """draft weights to compare"""
    eager: bool = False
    """also with PyTorch's own pointwise functions"""
    pairs: int = 5
    """interleaved repetitions of every cell"""

    # The options that each list has several values of.
    LISTS: ClassVar[dict[str, str]] = {
        "gamma": "gammas",
        "draft_budget": "budgets",
        "draft_dtype": "draft_dtypes",
        "draft_weights": "weights",
    }

    def check(self) -> None:
        require_at_least("pairs", self.pairs, 1)
        require_at_least("gammas", min(self.gammas or [0]), 0)
        given = self.draft.given()
        if "auto" in (given.get("gamma"), given.get("draft_budget")):
            raise ConfigError(
                "fixed drafts are compared here",
                where=f"{flag('gamma')}, {flag('draft_budget')}",
                seen="auto",
                required="numbers",
                fix="compare auto with them by reproduce/gamma_cell.py",
            )
        for option, several in self.LISTS.items():
            if getattr(self, several) and option in given:
                raise ConfigError(
                    "one value and several were given",
                    where=f"{flag(option)} and {flag(several)}",
                    seen=f"{given[option]} and {' '.join(map(str, getattr(self, several)))}",
                    required="either",
                    fix=f"leave out {flag(option)}",
                )

    def cells(self) -> list[Cell]:
        several = {option: dict.fromkeys(getattr(self, name) or ()) for option, name in self.LISTS.items()}
        lists = [[(option, value) for value in values] for option, values in several.items() if values]
        functions = [USUAL, *([COMPILED] if self.target.compile else []), *([IN_EAGER] if self.eager else [])]
        return [Cell(*values) for values in itertools.product(itertools.product(*lists), functions)]


def use_functions(session: engine.Session, pointwise: Pointwise, source: Source) -> None:
    from models.pointwise import use_pointwise

    session.runner.noise_source = source
    for model in filter(None, (session.runner.model, session.draft_model)):
        use_pointwise(model, pointwise)


def summarise(records: list[dict]) -> dict:
    """Medians over the pairs of one cell, the settings they share, and every pair's speedup."""
    return {
        "benchmark": "cpu_selfspec_summary",
        **{key: records[0][key] for key in SHARED},
        "pairs": len(records),
        "median": {key: _median([record[key] for record in records]) for key in MEDIANS},
        "speedups": [record["speedup"] for record in records],
        "peak_memory_bytes": records[-1]["peak_memory_bytes"],
        **provenance(),
    }


def _median(values: list) -> float | None:
    """None where a cell does not have the figure, such as a draft step at gamma 0."""
    return None if None in values else median(values)


def main(flags: Flags) -> None:
    from engine.bench import passes, record
    from engine.bench.resolved import largest_draft
    from engine.noise import compiled_source, in_passes
    from engine.timing import PhaseTimer
    from models.pointwise import EAGER, compiled
    from models.pointwise_cpp import pointwise_beside

    flags.check()
    cells = flags.cells()
    drafts = dict(zip(cells, flags.draft.variants(*(dict(cell.options) for cell in cells)), strict=True))
    target = replace(flags.target, compile=False)
    own_length = flags.sizes.prefix_len is not None or flags.rows.prompts is not None
    sizes = flags.sizes if own_length else replace(flags.sizes, prefix_len=PREFIX_LEN)
    most = largest_draft(list(drafts.values()), target, sizes)
    deepest = replace(most, gamma=max(int(draft.gamma) for draft in drafts.values()))
    config = RunConfig(target, flags.text, sizes, flags.rows, flags.sampling, output=flags.output, draft=deepest)
    session = engine.Session.open(config)
    sessions = {
        cell: session.variant(draft=draft, compile=cell.functions == COMPILED) for cell, draft in drafts.items()
    }
    functions = {USUAL: (pointwise_beside(session.runner.model.backend), in_passes), IN_EAGER: (EAGER, in_passes)}
    functions |= {COMPILED: (compiled(), compiled_source())} if flags.target.compile else {}
    prefill_seconds = passes.prefill(session)
    records: dict[Cell, list[dict]] = {cell: [] for cell in cells}
    for pair, kind in itertools.product(range(flags.pairs), dict.fromkeys(cell.functions for cell in cells)):
        own_cells = [cell for cell in cells if cell.functions == kind]
        plain = sessions[own_cells[0]]
        use_functions(plain, *functions[kind])
        if pair == 0:
            passes.warm_up(plain)
        baseline = passes.decode(plain, f"baseline {pair}")
        for cell in own_cells:
            own = sessions[cell]
            use_functions(own, *functions[kind])
            drafter = own.drafter(texts=baseline.tokens)
            if pair == 0:
                passes.warm_up(own, [drafter])
            timer = PhaseTimer(own.runner.device)
            speculative = passes.decode(own, f"gamma {drafter.gamma}", drafter, timer)
            # On a CPU a phase needs no synchronisation, so timing it costs nothing.
            made = passes.Passes(prefill_seconds, baseline, speculative, (timer, speculative))
            records[cell].append(record.make_record("cpu_selfspec", own, made))
            append_or_put_off(flags.output.output, records[cell][-1], session.put_off)
    *others, last = [record.rounded(summarise(kept)) for kept in records.values()]
    for summary in others:
        append_or_put_off(flags.output.output, summary, session.put_off)
    publish(flags.output.output, last, *map(json.dumps, others), put_off=session.put_off)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
