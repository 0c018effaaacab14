"""What the scripts of published tables and figures share: their options, the cells to measure, how they are shown."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.bench.arguments import HelpFormatter, Parser
from engine.bench.settings import DTYPES, POLICIES

from common.checkout import ROOT
from common.errors import ConfigError
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.quantize import SCHEMES
from reproduce.paper import figures
from reproduce.paper.columns import TEXTS
from reproduce.paper.figures import Figure
from reproduce.paper.published import Record
from reproduce.sweeping.cells import Cell, grid
from reproduce.sweeping.runner import OK, read_rows, run_cells

FOLDER = ROOT / "reproduce"
RESULTS, FIGURES = FOLDER / "results", FOLDER / "figures"
# Where records and figures go that nobody named a place for; git ignores it.
REPRODUCTION = ROOT / "reproduction"
SPEEDUPS, ACCEPTANCE, COST_MODEL = "speedups.jsonl", "acceptance.jsonl", "cost_model.jsonl"
# A copy of the default model without four of its layers: docs/checkpoints.md, "A draft model".
DEFAULT_DRAFT = ROOT / "checkpoints" / "SmolLM2-draft" / "model.pth"
MAKE_DRAFT = "python convert_hf_checkpoint.py --drop_layers 4-5,16-17 --out_dir checkpoints/SmolLM2-draft"
SELFSPEC, LONGSPEC, ACCEPT = "tests/selfspec_benchmark.py", "tests/longspec_benchmark.py", "reproduce/acceptance.py"


@dataclass(frozen=True)
class Sweep:
    """Where records and figures go, and which cells are run and shown."""

    output: str
    figures: str
    retry_failed: bool = False
    only: Sequence[str] = ()
    all: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Grid:
    """What is measured: a cell for each combination of sizes; None is the benchmarks' own default."""

    model: str | None = None
    dataset: str | None = None
    device: str | None = None
    dtype: str | None = None
    B: Sequence[int] = (1, 2, 4, 8)
    prefix_len: Sequence[int] = (1000, 4000)
    gamma: Sequence[int] = (3,)
    draft_budget: Sequence[int] = (512,)
    gen_len: int = 64

    def given(self, *flags: str) -> dict[str, object]:
        """Only what was asked for: what the default means is the benchmarks' own affair."""
        names = ("device", "dtype", "dataset", *flags)
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}

    def target(self, load_format: str | None = None) -> dict[str, object]:
        return {} if self.model is None else {"model": checkpoint_path(self.model, "model", load_format)}


@dataclass(frozen=True)
class Speculation(Grid):
    """Runs of the speculation benchmarks. draft_B: rows beside a draft model."""

    draft_dtype: str | None = None
    draft_weights: str | None = None
    draft_model: str | None = None
    draft_B: Sequence[int] = (1, 4)
    load_format: str | None = None
    model_name: str | None = None
    compile: bool = False

    def cells(self) -> list[Cell]:
        """Self-speculation at every size, and a draft model's at fewer rows, if there is one."""
        fixed = self.given("draft_dtype", "draft_weights", "load_format", "model_name", "compile")
        fixed |= {"gen_len": self.gen_len, "benchmark": True}
        sizes = {"prefix_len": self.prefix_len, "B": self.B, "gamma": self.gamma}
        sizes["streamingllm_budget"] = self.draft_budget
        target = self.target(self.load_format)
        cells = grid(SELFSPEC, fixed | target, sizes)
        draft = self._draft_model()
        if draft is not None:
            pair = {"model": draft} | ({"target": target["model"]} if target else {})
            cells += grid(LONGSPEC, fixed | pair, sizes | {"B": self.draft_B})
        return cells

    def _draft_model(self) -> str | None:
        """The draft model's checkpoint, or None, which is said."""
        if self.draft_model is not None:
            return checkpoint_path(self.draft_model, "draft_model", self.load_format)
        is_default = self.load_format != "dummy" and self.model in (None, str(DEFAULT_CHECKPOINT / "model.pth"))
        if is_default and DEFAULT_DRAFT.is_file():
            return checkpoint_path(str(DEFAULT_DRAFT), "draft_model")
        how = f"make the default one: {MAKE_DRAFT}" if is_default else "name one with --draft_model"
        print(f"Self-speculation only, without a draft model of its own ({how}).\n", file=sys.stderr)
        return None


@dataclass(frozen=True)
class Acceptance(Grid):
    """Runs of reproduce/acceptance.py: each measures all budgets, policies and texts."""

    B: Sequence[int] = (4,)
    gen_len: int = 128
    draft_dtype: str | None = None
    draft_weights: str | None = None
    policies: Sequence[str] = ("streaming", "snapkv")
    texts: Sequence[str] = TEXTS

    def cells(self) -> list[Cell]:
        fixed = self.given("draft_dtype", "draft_weights") | self.target() | {"gen_len": self.gen_len}
        fixed |= {"policies": self.policies, "budgets": self.draft_budget, "texts": self.texts}
        return grid(ACCEPT, fixed, {"prefix_len": self.prefix_len, "B": self.B, "gamma": self.gamma})


def checkpoint_path(path: str, flag: str, load_format: str | None = None) -> str:
    """The path as a cell carries it: relative to the checkout, where it is in it. Errors: ConfigError."""
    if load_format == "dummy":
        return path
    absolute = Path(os.path.abspath(path))
    if not absolute.is_file():
        raise ConfigError(
            "a checkpoint is not there",
            where=f"--{flag}",
            seen=path,
            required="a model.pth that convert_hf_checkpoint.py wrote",
            fix="convert one, or leave the flag out",
        )
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else str(absolute)


def make_parser(description: str, output: str, defaults: Grid) -> argparse.ArgumentParser:
    """The flags of every script that measures cells, prints a table and draws a figure: those of a Sweep and a Grid."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", help="the target's converted checkpoint (default: the built-in model)")
    add("--dataset", help="as that of the benchmarks (default: auto)")
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtype", choices=["auto", *DTYPES], help="the target's (default: auto)")
    add("--output", default=str(REPRODUCTION / output), help="file of records; a cell that has one is not run again")
    add("--figures", default=str(REPRODUCTION / "figures"), help="the folder for the figure, as PNG and SVG")
    add("--retry_failed", action="store_true", help="run cells again that failed")
    add("--only", nargs="+", default=[], metavar="CHOICE", help="name=value of a flag, or a cell's key: run only these")
    add("--all", action="store_true", help="show every record in --output, not only those of these cells")
    add("--timeout", type=float, help="seconds after which a cell is ended and has failed")
    add("--B", type=int, nargs="+", help="rows decoded together")
    add("--prefix_len", type=int, nargs="+", help="prompt tokens per row")
    add("--gamma", type=int, nargs="+", help="tokens drafted per round")
    add("--draft_budget", type=int, nargs="+", help="KV entries of the draft")
    add("--gen_len", type=int, help="new tokens per row")
    if hasattr(defaults, "draft_weights"):
        add("--draft_dtype", choices=["auto", "same", *DTYPES], help="the draft's (default: auto)")
        add("--draft_weights", choices=["same", *SCHEMES], help="the draft's linear layers (default: same)")
    if isinstance(defaults, Speculation):
        add("--draft_model", help="a draft model's checkpoint (default: checkpoints/SmolLM2-draft, if it is there)")
        add("--draft_B", type=int, nargs="+", help="rows decoded together beside it")
        add("--load_format", choices=["pth", "dummy"], help="dummy: random weights, costs only (default: pth)")
        add("--model_name", help="with --load_format dummy: the published shape to build")
    if isinstance(defaults, Acceptance):
        add("--policies", nargs="+", choices=POLICIES, help="what the draft's cache keeps")
        add("--texts", nargs="+", choices=TEXTS, help="what is drafted: own text, or the book's")
    if hasattr(defaults, "compile"):
        add("--compile", action="store_true", help="as that of the benchmarks")
    parser.set_defaults(**{k: list(v) if isinstance(v, tuple) else v for k, v in vars(defaults).items()})
    return parser


def read(options: type, args: argparse.Namespace) -> Any:
    return options(**{field.name: getattr(args, field.name) for field in fields(options)})


Shown = Callable[[list[Record]], str]
Drawn = Callable[[list[Record]], Figure]


def run(args: argparse.Namespace, options: type, name: str, table: Shown, figure: Drawn) -> None:
    """A script of this kind: `options` are those of its grid."""
    present(read(options, args).cells(), read(Sweep, args), name, table, figure)


def present(cells: Sequence[Cell], sweep: Sweep, name: str, table: Shown, figure: Drawn) -> None:
    """Measure the cells that have no record yet, draw the figure, print the table; exit code 1 if a cell failed.

    Where every cell failed, the figure that is there stays as it is.
    """
    figures.require_matplotlib()
    if Path(sweep.output).parent == REPRODUCTION:
        with suppress(OSError):  # where it cannot be made, the output is refused
            REPRODUCTION.mkdir(exist_ok=True)
    rows = run_cells(cells, sweep.output, retry_failed=sweep.retry_failed, timeout_s=sweep.timeout, only=sweep.only)
    scripts = {cell.script for cell in cells}
    shown = [row for row in read_rows(sweep.output).values() if row["script"] in scripts] if sweep.all else rows
    records = [row["record"] for row in shown if row["status"] == OK]
    every_cell_failed = bool(rows) and not records
    if not every_cell_failed:
        drawn = figures.save(figure(records), name, Path(sweep.figures))
        print("\n" + table(records) + "\n")
        for path in drawn:
            print(f"  {path}")
    labels = {cell.key: cell.label for cell in cells}
    failed = [row for row in rows if row["status"] != OK]
    for row in failed:
        print(f"  failed: {labels.get(row['key'], row['key'])}: {row['error']}", file=sys.stderr)
    if failed:
        print("  --retry_failed runs these again", file=sys.stderr)
        sys.exit(1)
