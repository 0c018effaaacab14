"""The cost model against end-to-end runs: predicted and measured speedups, and `--gamma auto` against fixed gammas.

    python reproduce/cost_model_error.py

The costs are measured over random entries on a grid of batches and contexts, in a process of its own; the runs are
of real prompts at those sizes and at one between them, which the model interpolates. Each prediction takes the
acceptance rate of the run that it is compared with.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from engine.arguments import HelpFormatter, Parser
from engine.cost_model import CostGrid, tokens_per_round
from engine.settings import DTYPES
from kv_cache.errors import ConfigError, exit_on_user_error
from reproduce import reproduction
from reproduce.figures import CATEGORIES, MARKERS, Figure, Panel, Series
from reproduce.reproduction import COST_MODEL, FIGURES, RESULTS, Record, side_by_side
from reproduce.sweeping.cells import Cell, grid

NAME, GRID, CELL = "cost_model_error", "reproduce/cost_grid.py", "reproduce/gamma_cell.py"
BATCHES, CONTEXTS, BETWEEN = (1, 8), (1000, 4000), (4, 2000)
BUDGETS, GAMMAS = (128, 512), (1, 3, 5)
TARGET = 0.10
# `auto` over the better of gamma 3 and plain decoding.
LEAST_RATIO = 0.95
# Where costs and a run have to agree to be compared.
SET_UP = ("model", "machine", "gpu", "device", "dtype", "draft_dtype", "draft_weights", "draft_layers", "quantize")
SET_UP += ("kv_dtype", "draft_kv_dtype", "attention", "compile", "pointwise")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", help="the target's converted checkpoint (default: the built-in model)")
    add("--dataset", help="as that of the benchmarks (default: the built-in book)")
    add("--B", type=int, nargs="+", default=list(BATCHES), help="rows decoded together: the costs' grid")
    add("--prefix_len", type=int, nargs="+", default=list(CONTEXTS), help="prompt tokens per row: the costs' grid")
    add("--between", type=int, nargs=2, default=list(BETWEEN), help="rows and prompt tokens of one more run")
    add("--budget", type=int, nargs="+", default=list(BUDGETS), help="KV entries of the draft")
    add("--gamma", type=int, nargs="+", default=list(GAMMAS), help="tokens drafted per round")
    add("--gen_len", type=int, default=64, help="new tokens per row")
    add("--repeats", type=int, default=3, help="how often every run is made, in turn with all others of its size")
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtype", choices=["auto", *DTYPES], help="the target's (default: auto)")
    add("--compile", action="store_true", help="as that of the benchmarks")
    add("--output", default=str(RESULTS / COST_MODEL), help="the file of records")
    add("--figures", default=str(FIGURES), help="the folder for the figure, as PNG and SVG")
    add("--retry_failed", action="store_true", help="run cells again that failed")
    add("--only", nargs="+", default=[], metavar="CHOICE", help="name=value of a flag, or a cell's key: run only these")
    add("--all", action="store_true", help="show every record in --output, not only those of these cells")
    add("--timeout", type=float, help="seconds after which a cell is ended and has failed")
    return parser


def cells(args: argparse.Namespace) -> list[Cell]:
    """The costs, then the runs at the corners of their grid and at the place between."""
    fixed = reproduction.given(args, "device", "dtype", "dataset") | ({"compile": True} if args.compile else {})
    fixed |= {} if args.model is None else {"model": reproduction.checkpoint_path(args.model, "model")}
    costs = {"batches": args.B, "contexts": args.prefix_len, "gammas": args.gamma, "budgets": args.budget}
    costs |= {"policies": ["streaming"], "alpha": 0.8}
    runs = {"gammas": args.gamma, "budgets": args.budget, "gen_len": args.gen_len, "repeats": args.repeats}
    sizes = [*grid(CELL, fixed | runs, {"B": args.B, "prefix_len": args.prefix_len})]
    batch, context = args.between
    for name, value, measured in (("rows", batch, args.B), ("prompt tokens", context, args.prefix_len)):
        if not min(measured) <= value <= max(measured):
            raise ConfigError(
                "the run between lies outside of the costs' grid",
                where=f"--between: {name}",
                seen=value,
                required=f"{min(measured)} to {max(measured)}",
                fix="name a size between those of --B and --prefix_len",
            )
    sizes.append(Cell(CELL, {**fixed, **runs, "B": batch, "prefix_len": context}))
    return [Cell(GRID, {**fixed, **costs}), *dict((cell.key, cell) for cell in sizes).values()]


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


def comparison(grid: CostGrid, record: Record, row: dict[str, Any]) -> dict[str, Any]:
    costs = grid.at(record["B"], record["prefix_len"], (record.get("draft_policy") or "streaming", row["draft_budget"]))
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


def against_fixed(record: Record) -> dict[str, Any]:
    """`auto` over the better of plain decoding and gamma 3 (or the gamma nearest to it) with the same budget."""
    rows = {row["way"]: row for row in record["rows"]}
    auto = rows["auto"]
    same = [row for row in record["rows"] if row["draft_budget"] == auto["draft_budget"] and row["way"] != "auto"]
    usual = min(same, key=lambda row: abs(row["gamma"] - 3))
    rates = zip(*(rows[way]["tokens_per_second"] for way in ("auto", "plain", usual["way"])), strict=True)
    ratios = [own / max(plain, fixed) for own, plain, fixed in rates]
    return {
        "B": record["B"],
        "prefix_len": record["prefix_len"],
        "auto": auto["speedup"],
        "usual": usual["speedup"],
        "usual_gamma": usual["gamma"],
        "best": max(row["speedup"] for row in same),
        "best_gamma": max(same, key=lambda row: row["speedup"])["gamma"],
        "ratio": median(ratios),
        "ratios": ratios,
        "identical": auto["identical_rows"],
        "mean_gamma": float(np.mean([gamma for run in auto["gammas"] for gamma in run])),
    }


ERROR_HEAD = ["rows", "context", "budget", "gamma", "acceptance", "predicted", "measured", "error"]
AUTO_HEAD = [
    "rows",
    "context",
    "gamma 3",
    "best fixed",
    "its gamma",
    "auto",
    "its mean gamma",
    "auto / better",
    "lowest",
]


def error_lines(compared: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            *(str(row[name]) for name in ("B", "prefix_len", "draft_budget", "gamma")),
            *(f"{row[name]:.2f}" for name in ("acceptance_rate", "predicted", "measured")),
            f"{row['error']:+.1%}",
        ]
        for row in compared
    ]


def error_summary(compared: Sequence[dict[str, Any]]) -> str:
    if not compared:
        return "nothing compared"
    errors = [abs(row["error"]) for row in compared]
    return f"median error {median(errors):.1%}, largest {max(errors):.1%}; the aim is a median of {TARGET:.0%}"


def auto_lines(records: Sequence[Record]) -> list[list[str]]:
    return [
        [
            str(row["B"]),
            str(row["prefix_len"]),
            f"{row['usual']:.2f}" + ("" if row["usual_gamma"] == 3 else f" (gamma {row['usual_gamma']})"),
            f"{row['best']:.2f}",
            str(row["best_gamma"]),
            f"{row['auto']:.2f}",
            f"{row['mean_gamma']:.1f}",
            f"{row['ratio']:.3f}",
            f"{min(row['ratios']):.3f}",
        ]
        for row in (against_fixed(record) for record in records if record["benchmark"] == "gamma_cell")
    ]


def auto_summary(records: Sequence[Record]) -> str:
    ratios = [against_fixed(record)["ratio"] for record in records if record["benchmark"] == "gamma_cell"]
    if not ratios:
        return "nothing measured"
    n_below = sum(ratio < LEAST_RATIO for ratio in ratios)
    verdict = "none lies" if n_below == 0 else f"{n_below} of {len(ratios)} lie" if n_below > 1 else "one lies"
    return f"the aim is {LEAST_RATIO} or more at every size: {verdict} below, the lowest at {min(ratios):.3f}"


def table(records: list[Record]) -> str:
    compared = comparisons(records)
    return "\n".join(
        [
            "  Speedups, predicted by the cost model and measured end to end\n",
            side_by_side(ERROR_HEAD, error_lines(compared)),
            f"  {error_summary(compared)}",
            "\n  --gamma auto, at the largest budget, against the better of gamma 3 and plain decoding\n",
            side_by_side(AUTO_HEAD, auto_lines(records)),
            f"  {auto_summary(records)}",
        ]
    )


def figure(records: list[Record]) -> Figure:
    compared = comparisons(records)
    by_size: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in compared:
        by_size.setdefault((row["B"], row["prefix_len"]), []).append(row)
    ends = [row[name] for row in compared for name in ("predicted", "measured")] or [1.0]
    diagonal = Series("equal", [min(ends), max(ends)], [min(ends), max(ends)], "#999999", marker="")
    points = [
        Series(
            f"B {size[0]}, {size[1]} tokens",
            [row["measured"] for row in rows],
            [row["predicted"] for row in rows],
            colour,
            has_line=False,
        )
        for (size, rows), colour in zip(sorted(by_size.items()), itertools.cycle(CATEGORIES), strict=False)
    ]
    left = Panel("the cost model", "measured speedup", "predicted speedup", (diagonal, *points), is_log_x=False)
    autos = [against_fixed(record) for record in records if record["benchmark"] == "gamma_cell"]
    names = [f"B {row['B']}, {row['prefix_len']}" for row in autos]
    places = range(len(autos))
    points = [
        Series(name, places, [row[key] for row in autos], colour, marker=marker, names=labels, has_line=False)
        for name, key, colour, marker, labels in (
            ("gamma 3", "usual", CATEGORIES[0], MARKERS[0], ()),
            ("best fixed gamma", "best", CATEGORIES[1], MARKERS[2], ()),
            ("auto", "auto", CATEGORIES[2], MARKERS[1], names),
        )
    ]
    right = Panel(
        "--gamma auto at several rows and contexts",
        "setting, in the order of the table",
        "speedup",
        tuple(points),
        is_log_x=False,
        reference=(1.0, "plain decoding"),
    )
    return Figure("Predicted and measured speedups", (left, right))


def main() -> None:
    args = make_parser().parse_args()
    reproduction.present(args, cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
