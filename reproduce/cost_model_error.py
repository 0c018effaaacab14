"""The cost model against end-to-end runs: predicted and measured speedups, and `auto` against fixed gammas.

    python reproduce/cost_model_error.py

The costs are measured over random entries on a grid of batches and contexts, in a process of its own; the runs are
of real prompts at those sizes and at one between them, which the model interpolates. Each prediction takes the
acceptance rate of the run that it is compared with. The values of --B and --prefix_len are also the costs' grid: runs
are made at its corners.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import numpy as np

from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.tables import Column, console
from engine.bench.cost_flags import LEAST
from engine.cost_model.costs import CostGrid, tokens_per_round
from kv_cache.streaming import Streaming
from reproduce.paper import auto_against_fixed, columns, reproduction
from reproduce.paper.auto_against_fixed import LEAST_GEN_LEN
from reproduce.paper.figures import Figure, Panel, Series, lines
from reproduce.paper.published import Record
from reproduce.sweeping.cells import Cell, grid

NAME, GRID, CELL = "cost_model_error", "reproduce/cost_grid.py", "reproduce/gamma_cell.py"
# The sizes' flags here, by what the cost model calls them.
SIZES = {"batches": "B", "contexts": "prefix_len", "gammas": "gamma", "budgets": "draft_budget"}
TARGET = 0.10
OUTPUT = str(reproduction.REPRODUCTION / reproduction.COST_MODEL)
# Where costs and a run have to agree to be compared.
SET_UP = ("model", "machine", "gpu", "device", "dtype", "draft_dtype", "draft_weights", "draft_layers", "quantize")
SET_UP += ("kv_dtype", "draft_kv_dtype", "attention", "compile", "pointwise")


@dataclass(frozen=True)
class CostModel(reproduction.Grid):
    """Rows and contexts are the costs' grid, and runs are made at its corners, and at one place between them."""

    B: tuple[int, ...] = (1, 8)
    """rows decoded together"""
    gamma: tuple[int, ...] = (1, 3, 5)
    """tokens drafted per round"""
    draft_budget: tuple[int, ...] = (128, 512)
    """KV entries of the draft"""
    between: tuple[int, int] = (4, 2000)
    """rows and prompt tokens of one more run"""
    repeats: int = 3
    """how often every run is made, interleaved with all others of its size"""
    compile: bool = False
    """as that of the benchmarks"""
    sweep: reproduction.Sweep = field(default_factory=lambda: reproduction.Sweep(OUTPUT))

    def cells(self) -> list[Cell]:
        """The costs, then the runs at the corners of their grid and at the place between. Errors: ConfigError."""
        self._check()
        gammas, budgets = (sorted(set(values)) for values in (self.gamma, self.draft_budget))
        fixed = self.given("compile") | self.target()
        costs = {"batches": self.B, "contexts": self.prefix_len, "gammas": gammas, "budgets": budgets}
        costs |= {"policies": ["streaming"], "alpha": 0.8}
        runs = {"gammas": gammas, "budgets": budgets, "gen_len": self.gen_len, "repeats": self.repeats}
        batch, context = self.between
        sizes = grid(CELL, fixed | runs, {"B": self.B, "prefix_len": self.prefix_len})
        sizes.append(Cell(CELL, {**fixed, **runs, "B": batch, "prefix_len": context}))
        return [Cell(GRID, {**fixed, **costs}), *{cell.key: cell for cell in sizes}.values()]

    def _check(self) -> None:
        for name, size in SIZES.items():
            require_at_least(size, min(getattr(self, size)), LEAST[name])
        # Behind the sinks, which no flag here changes, there is room for the largest block.
        require_at_least("draft_budget", min(self.draft_budget), Streaming().n_sink + max(self.gamma) + 1)
        require_at_least("gen_len", self.gen_len, LEAST_GEN_LEN)
        require_at_least("repeats", self.repeats, 1)
        for name, value, sizes in zip(("rows", "prompt tokens"), self.between, (self.B, self.prefix_len), strict=True):
            if not min(sizes) <= value <= max(sizes):
                raise ConfigError(
                    "the run between lies outside of the costs' grid",
                    where=f"{flag('between')}: {name}",
                    seen=value,
                    required=f"{min(sizes)} to {max(sizes)}",
                    fix=f"name a size between those of {flag('B')} and {flag('prefix_len')}",
                )


def comparisons(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One for each fixed (rows, context, budget, gamma): the measured speedup, the predicted one, and the error.

    A run is compared with the last grid of the same model, machine and settings that reaches to its size; one that
    has none is left out.
    """
    grids = [record for record in records if record["benchmark"] == "cost_model"]
    found = []
    for record in (record for record in records if record["benchmark"] == "gamma_cell"):
        fitting = [grid_of(costs) for costs in grids if is_same_set_up(costs, record)]
        for row in record["rows"]:
            covering = [costs for costs in fitting if covers(costs, record, row)]
            if covering:
                found.append(comparison(covering[-1], record, row))
    return found


def is_same_set_up(costs: Record, run: Record) -> bool:
    """Whether what both records say of model, machine and storage is the same."""
    return all(costs[name] == run[name] for name in SET_UP if name in costs and name in run)


def covers(costs: CostGrid, record: Record, row: dict[str, Any]) -> bool:
    return (
        isinstance(row["gamma"], int)
        and row["gamma"] > 0
        and row["acceptance_rate"] is not None
        and (record.get("draft_policy") or "streaming", row["draft_budget"]) in costs.drafts
        and costs.batches[0] <= record["B"] <= costs.batches[-1]
        and costs.contexts[0] <= record["prefix_len"] <= costs.contexts[-1]
    )


def comparison(measured: CostGrid, record: Record, row: dict[str, Any]) -> dict[str, Any]:
    draft = record.get("draft_policy") or "streaming", row["draft_budget"]
    costs = measured.at(record["B"], record["prefix_len"], draft)
    predicted = costs.speedup(tokens_per_round(row["acceptance_rate"], row["gamma"]), row["gamma"])
    return {
        **{name: record[name] for name in ("B", "prefix_len")},
        **{name: row[name] for name in ("draft_budget", "gamma", "acceptance_rate")},
        "predicted": predicted,
        "measured": row["speedup"],
        "error": predicted / row["speedup"] - 1,
    }


def grid_of(record: Record) -> CostGrid:
    """The grid of a cost model's record."""
    return CostGrid(
        batches=tuple(record["batches"]),
        contexts=tuple(record["contexts"]),
        gammas=tuple(record["gammas"]),
        drafts=tuple((draft["draft_policy"], draft["draft_budget"]) for draft in record["drafts"]),
        **{name: np.array(record[f"{name}_ms"]) for name in ("plain", "verify", "draft", "other")},
    )


ERRORS = (
    *columns.of("B", "prefix_len", "draft_budget", "gamma"),
    Column("acceptance_rate", "acceptance", ".2f"),
    Column("predicted", "predicted", ".2f"),
    Column("measured", "measured", ".2f"),
    Column("error", "error", "+.1%"),
)


def error_summary(compared: Sequence[dict[str, Any]]) -> str:
    if not compared:
        return "nothing compared"
    errors = [abs(row["error"]) for row in compared]
    return f"median error {median(errors):.1%}, largest {max(errors):.1%}; the aim is a median of {TARGET:.0%}"


def table(records: list[Record]) -> str:
    compared = comparisons(records)
    return "\n".join(
        [
            "  Speedups, predicted by the cost model and measured end to end\n",
            console(compared, ERRORS),
            f"  {error_summary(compared)}",
            *(auto_against_fixed.table(mode, records) for mode in auto_against_fixed.MODES),
        ]
    )


def figure(records: list[Record]) -> Figure:
    compared = comparisons(records)
    ends = [row[name] for row in compared for name in ("predicted", "measured")] or [1.0]
    diagonal = Series("equal", [min(ends), max(ends)], [min(ends), max(ends)], "#999999", marker="")
    points = lines(
        sorted(compared, key=itemgetter("B", "prefix_len")),
        lambda row: f"B {row['B']}, {row['prefix_len']} tokens",
        itemgetter("measured"),
        itemgetter("predicted"),
        marker="o",
        has_line=False,
    )
    left = Panel("the cost model", "measured speedup", "predicted speedup", (diagonal, *points), is_log_x=False)
    return Figure("Predicted and measured speedups", (left, auto_against_fixed.panel(records)))


def main(flags: CostModel) -> None:
    reproduction.present(flags.cells(), flags.sweep, NAME, table, figure)


if __name__ == "__main__":
    cli.run_alone(main, CostModel)
