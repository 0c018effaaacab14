"""What the scripts of published tables and figures share: their options, the cells to measure, how they are shown."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from common.checkout import ROOT
from common.errors import ConfigError, flag
from engine.bench.draft_flags import PolicyName
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.names import Dtype, Scheme
from reproduce.paper import figures
from reproduce.paper.columns import TEXTS
from reproduce.paper.figures import Figure
from reproduce.paper.published import Record
from reproduce.sweeping.cells import Cell, grid
from reproduce.sweeping.runner import OK, read_rows, run_cells

# Where records and figures go that nobody named a place for; git ignores it.
REPRODUCTION = ROOT / "reproduction"
SPEEDUPS, ACCEPTANCE, COST_MODEL = "speedups.jsonl", "acceptance.jsonl", "cost_model.jsonl"
# A copy of the default model without four of its layers: docs/checkpoints.md, "A draft model".
DEFAULT_DRAFT = ROOT / "checkpoints" / "SmolLM2-draft" / "model.pth"
MAKE_DRAFT = "python convert_hf_checkpoint.py --drop_layers 4-5,16-17 --out_dir checkpoints/SmolLM2-draft"
SELFSPEC, LONGSPEC, ACCEPT = "tests/selfspec_benchmark.py", "tests/longspec_benchmark.py", "reproduce/acceptance.py"
UNSET, BUILT_IN = (arg(help_behavior_hint=f"(default: {what})") for what in ("none", "the built-in model"))
IF_THERE = arg(help_behavior_hint="(default: checkpoints/SmolLM2-draft, if it is there)")
CHOICES = arg(metavar="[CHOICE ...]")
DraftDtype = Literal["auto", "same"] | Dtype
DraftWeights = Literal["same"] | Scheme


@dataclass(frozen=True)
class Sweep:
    """Where records and figures go, and which cells are run and shown."""

    output: str  # file of records; a cell that has one is not run again
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figure, as PNG and SVG
    retry_failed: bool = False  # run cells again that failed
    only: Annotated[tuple[str, ...], CHOICES] = ()  # name=value of a flag, or a cell's key: run only these
    all: bool = False  # show every record in --output, not only those of these cells
    timeout: Annotated[float | None, UNSET] = None  # seconds after which a cell is ended and has failed


@dataclass(frozen=True)
class Grid:
    """What is measured: a cell for each combination of sizes; what is not given is the benchmarks' own default."""

    model: Annotated[str | None, BUILT_IN] = None  # the target's converted checkpoint
    dataset: str = "auto"  # as that of the benchmarks
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    dtype: Literal["auto"] | Dtype = "auto"  # the target's
    B: tuple[int, ...] = (1, 2, 4, 8)  # rows decoded together
    prefix_len: tuple[int, ...] = (1000, 4000)  # prompt tokens per row
    gamma: tuple[int, ...] = (3,)  # tokens drafted per round
    draft_budget: tuple[int, ...] = (512,)  # KV entries of the draft
    gen_len: int = 64  # new tokens per row

    def given(self, *flags: str) -> dict[str, object]:
        """Only what is not the benchmarks' own default."""
        values = {name: getattr(self, name) for name in ("device", "dtype", "dataset", *flags)}
        return {name: value for name, value in values.items() if value != getattr(type(self), name)}

    def checkpoint(self, name: str) -> str | None:
        """That of a flag, as a cell carries it: relative to the checkout, where it is in it. Errors: ConfigError."""
        path = getattr(self, name)
        if path is None or getattr(self, "load_format", "pth") == "dummy":
            return path
        absolute = Path(os.path.abspath(path))
        if not absolute.is_file():
            required, fix = "a model.pth that convert_hf_checkpoint.py wrote", "convert one, or leave the flag out"
            raise ConfigError("a checkpoint is not there", flag(name), path, required, fix)
        return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else str(absolute)


@dataclass(frozen=True)
class Speculation(Grid):
    """Runs of the speculation benchmarks."""

    draft_dtype: DraftDtype = "auto"  # the draft's
    draft_weights: DraftWeights = "same"  # the draft's linear layers
    draft_model: Annotated[str | None, IF_THERE] = None  # a draft model's checkpoint
    draft_B: tuple[int, ...] = (1, 4)  # rows decoded together beside it
    load_format: Literal["pth", "dummy"] = "pth"  # dummy: random weights, costs only
    model_name: Annotated[str | None, UNSET] = None  # with --load_format dummy: the published shape to build
    compile: bool = False  # as that of the benchmarks
    sweep: Sweep = Sweep(str(REPRODUCTION / SPEEDUPS))

    def cells(self) -> list[Cell]:
        """Self-speculation at every size, and a draft model's at fewer rows, if there is one."""
        fixed = self.given("draft_dtype", "draft_weights", "load_format", "model_name", "compile")
        fixed |= {"gen_len": self.gen_len, "benchmark": True}
        sizes = {"prefix_len": self.prefix_len, "B": self.B, "gamma": self.gamma}
        sizes["streamingllm_budget"] = self.draft_budget
        target, draft = self.checkpoint("model"), self._with_draft().checkpoint("draft_model")
        cells = grid(SELFSPEC, fixed | {"model": target}, sizes)
        if draft is not None:
            cells += grid(LONGSPEC, fixed | {"model": draft, "target": target}, sizes | {"B": self.draft_B})
        return cells

    def _with_draft(self) -> "Speculation":
        """With the default draft model, where none is given and it is there; where not, that is said."""
        if self.draft_model is not None:
            return self
        is_default = self.load_format != "dummy" and self.model in (None, str(DEFAULT_CHECKPOINT / "model.pth"))
        if is_default and DEFAULT_DRAFT.is_file():
            return replace(self, draft_model=str(DEFAULT_DRAFT))
        how = f"make the default one: {MAKE_DRAFT}" if is_default else "name one with --draft_model"
        print(f"Self-speculation only, without a draft model of its own ({how}).\n", file=sys.stderr)
        return self


@dataclass(frozen=True)
class Acceptance(Grid):
    """Runs of reproduce/acceptance.py: each measures all budgets, policies and texts."""

    B: tuple[int, ...] = (4,)  # rows decoded together
    gen_len: int = 128  # new tokens per row
    draft_dtype: DraftDtype = "auto"  # the draft's
    draft_weights: DraftWeights = "same"  # the draft's linear layers
    policies: tuple[PolicyName, ...] = ("streaming", "snapkv")  # what the draft's cache keeps
    texts: tuple[Literal[TEXTS], ...] = TEXTS  # what is drafted: own text, or the book's
    sweep: Sweep = Sweep(str(REPRODUCTION / ACCEPTANCE))

    def cells(self) -> list[Cell]:
        fixed = self.given("draft_dtype", "draft_weights") | {"model": self.checkpoint("model")}
        fixed |= {"gen_len": self.gen_len, "policies": self.policies, "budgets": self.draft_budget, "texts": self.texts}
        if set(self.policies) == {"full"}:  # which has no budget
            del fixed["budgets"]
        return grid(ACCEPT, fixed, {"prefix_len": self.prefix_len, "B": self.B, "gamma": self.gamma})


def make_ready(output: str) -> None:
    """Before anything is measured: figures can be drawn, and records have their folder. Errors: ConfigError."""
    figures.require_matplotlib()
    if Path(output).parent == REPRODUCTION:
        with suppress(OSError):  # where it cannot be made, the output is refused
            REPRODUCTION.mkdir(exist_ok=True)


Table = Callable[[list[Record]], str]
Drawn = Callable[[list[Record]], Figure]


def showing(name: str, table: Table, figure: Drawn) -> Callable[[Any], None]:
    """What a script does with its Grid: the cells are measured and shown."""
    return lambda grid: present(grid.cells(), grid.sweep, name, table, figure)


def present(cells: Sequence[Cell], sweep: Sweep, name: str, table: Table, figure: Drawn) -> None:
    """Measure the cells that have no record yet, draw the figure, print the table; exit code 1 if a cell failed.

    Where every cell failed, the figure that is there stays as it is.
    """
    make_ready(sweep.output)
    rows = run_cells(cells, sweep.output, retry_failed=sweep.retry_failed, timeout_s=sweep.timeout, only=sweep.only)
    scripts = {cell.script for cell in cells}
    shown = [row for row in read_rows(sweep.output).values() if row["script"] in scripts] if sweep.all else rows
    records = [row["record"] for row in shown if row["status"] == OK]
    if records or not rows:
        drawn = figures.save(figure(records), name, Path(sweep.figures))
        print("", table(records), "", *(f"  {path}" for path in drawn), sep="\n")
    labels = {cell.key: cell.label() for cell in cells}
    failed = [f"  failed: {labels.get(row['key'], row['key'])}: {row['error']}" for row in rows if row["status"] != OK]
    if failed:
        print(*failed, "  --retry_failed runs these again", sep="\n", file=sys.stderr)
        sys.exit(1)
