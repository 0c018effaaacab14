"""What the scripts of published tables and figures share: flags, cells to measure, the printed table, the figure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkout import ROOT
from common.errors import ConfigError
from engine.bench.arguments import HelpFormatter, Parser
from engine.bench.settings import DTYPES, POLICIES
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.quantize import SCHEMES
from reproduce.acceptance import TEXTS
from reproduce.paper import figures
from reproduce.paper.figures import Figure
from reproduce.paper.published import SELF, published
from reproduce.sweeping.cells import Cell, grid
from reproduce.sweeping.runner import OK, read_rows, run_cells

Record = dict[str, Any]
FOLDER = ROOT / "reproduce"
RESULTS, FIGURES = FOLDER / "results", FOLDER / "figures"
# Where records and figures go that nobody named a place for; git ignores it.
REPRODUCTION = ROOT / "reproduction"
SPEEDUPS, ACCEPTANCE, COST_MODEL = "speedups.jsonl", "acceptance.jsonl", "cost_model.jsonl"
# A copy of the default model without four of its layers: README.md, "A draft model of its own".
DEFAULT_DRAFT = ROOT / "checkpoints" / "SmolLM2-draft" / "model.pth"
MAKE_DRAFT = "python convert_hf_checkpoint.py --drop_layers 4-5,16-17 --out_dir checkpoints/SmolLM2-draft"
SELFSPEC, LONGSPEC, ACCEPT = "tests/selfspec_benchmark.py", "tests/longspec_benchmark.py", "reproduce/acceptance.py"
NONE = "not measured"
SLOWER = "*"


@dataclass(frozen=True)
class Sizes:
    """What a script measures by default: one cell for each combination. draft_B: rows beside a draft model."""

    B: tuple[int, ...] = (1, 2, 4, 8)
    prefix_len: tuple[int, ...] = (1000, 4000)
    gamma: tuple[int, ...] = (3,)
    draft_budget: tuple[int, ...] = (512,)
    gen_len: int = 64
    draft_B: tuple[int, ...] = (1, 4)


def make_parser(description: str, output: str) -> argparse.ArgumentParser:
    """The flags of every script that measures cells, prints a table and draws a figure."""
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
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes) -> None:
    """The axes of a grid of runs, under the benchmarks' names, and their length."""
    add = parser.add_argument
    add("--B", type=int, nargs="+", default=list(sizes.B), help="rows decoded together")
    add("--prefix_len", type=int, nargs="+", default=list(sizes.prefix_len), help="prompt tokens per row")
    add("--gamma", type=int, nargs="+", default=list(sizes.gamma), help="tokens drafted per round")
    add("--draft_budget", type=int, nargs="+", default=list(sizes.draft_budget), help="KV entries of the draft")
    add("--gen_len", type=int, default=sizes.gen_len, help="new tokens per row")


def _add_draft_storage(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--draft_dtype", choices=["auto", "same", *DTYPES], help="the draft's (default: auto)")
    add("--draft_weights", choices=["same", *SCHEMES], help="the draft's linear layers (default: same)")


def speculation_parser(description: str, sizes: Sizes) -> argparse.ArgumentParser:
    """For scripts whose cells are runs of the speculation benchmarks."""
    parser = make_parser(description, SPEEDUPS)
    add_sizes(parser, sizes)
    _add_draft_storage(parser)
    add = parser.add_argument
    add("--draft_model", help="a draft model's checkpoint (default: checkpoints/SmolLM2-draft, if it is there)")
    add("--draft_B", type=int, nargs="+", default=list(sizes.draft_B), help="rows decoded together beside it")
    add("--load_format", choices=["pth", "dummy"], help="dummy: random weights, costs only (default: pth)")
    add("--model_name", help="with --load_format dummy: the published shape to build")
    add("--compile", action="store_true", help="as that of the benchmarks")
    return parser


def acceptance_parser(description: str, sizes: Sizes) -> argparse.ArgumentParser:
    """For scripts whose cells are runs of reproduce/acceptance.py."""
    parser = make_parser(description, ACCEPTANCE)
    add_sizes(parser, sizes)
    _add_draft_storage(parser)
    add = parser.add_argument
    add("--policies", nargs="+", choices=POLICIES, default=["streaming", "snapkv"], help="what the draft's cache keeps")
    add("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="what is drafted: own text, or the book's")
    return parser


def speculation_cells(args: argparse.Namespace) -> list[Cell]:
    """Self-speculation at every size, and a draft model's at fewer rows, if there is one."""
    fixed = given(args, "device", "dtype", "dataset", "draft_dtype", "draft_weights", "load_format", "model_name")
    fixed |= {"compile": True} if args.compile else {}
    fixed |= {"gen_len": args.gen_len, "benchmark": True}
    axes = {"prefix_len": args.prefix_len, "B": args.B, "gamma": args.gamma, "streamingllm_budget": args.draft_budget}
    target = {} if args.model is None else {"model": checkpoint_path(args.model, "model", args.load_format)}
    cells = grid(SELFSPEC, fixed | target, axes)
    draft = _draft_model(args)
    if draft is not None:
        pair = {"model": draft} | ({"target": target["model"]} if target else {})
        cells += grid(LONGSPEC, fixed | pair, axes | {"B": args.draft_B})
    return cells


def acceptance_cells(args: argparse.Namespace) -> list[Cell]:
    """One for each prompt length, number of rows and gamma; each measures all budgets, policies and texts."""
    fixed = given(args, "device", "dtype", "dataset", "draft_dtype", "draft_weights")
    fixed |= {} if args.model is None else {"model": checkpoint_path(args.model, "model")}
    fixed |= {"gen_len": args.gen_len, "policies": args.policies, "budgets": args.draft_budget, "texts": args.texts}
    return grid(ACCEPT, fixed, {"prefix_len": args.prefix_len, "B": args.B, "gamma": args.gamma})


def given(args: argparse.Namespace, *flags: str) -> dict[str, object]:
    """Only what was asked for: what the default means is the benchmarks' own affair."""
    return {flag: getattr(args, flag) for flag in flags if getattr(args, flag) is not None}


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


def _draft_model(args: argparse.Namespace) -> str | None:
    """The draft model's checkpoint, or None, which is said."""
    if args.draft_model is not None:
        return checkpoint_path(args.draft_model, "draft_model", args.load_format)
    is_default = args.load_format != "dummy" and args.model in (None, str(DEFAULT_CHECKPOINT / "model.pth"))
    if is_default and DEFAULT_DRAFT.is_file():
        return checkpoint_path(str(DEFAULT_DRAFT), "draft_model")
    how = f"make the default one: {MAKE_DRAFT}" if is_default else "name one with --draft_model"
    print(f"Self-speculation only, without a draft model of its own ({how}).\n", file=sys.stderr)
    return None


def present(
    args: argparse.Namespace,
    cells: Sequence[Cell],
    name: str,
    table: Callable[[list[Record]], str],
    figure: Callable[[list[Record]], Figure],
) -> None:
    """Measure the cells that have no record yet, draw the figure, print the table; exit code 1 if a cell failed.

    Where every cell failed, the figure that is there stays as it is.
    """
    figures.require_matplotlib()
    if Path(args.output).parent == REPRODUCTION:
        with suppress(OSError):  # where it cannot be made, the output is refused
            REPRODUCTION.mkdir(exist_ok=True)
    rows = run_cells(cells, args.output, retry_failed=args.retry_failed, timeout_s=args.timeout, only=args.only)
    scripts = {cell.script for cell in cells}
    shown = [row for row in read_rows(args.output).values() if row["script"] in scripts] if args.all else rows
    records = [row["record"] for row in shown if row["status"] == OK]
    every_cell_failed = bool(rows) and not records
    if not every_cell_failed:
        drawn = figures.save(figure(records), name, Path(args.figures))
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


def side_by_side(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text: the first to the left, all others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    rule = "-" * len(shown[0])
    return "\n".join(f"  {line}".rstrip() for line in [shown[0], rule, *shown[1:]])


def number(value: object, digits: int = 2) -> str:
    """A measured figure, or that there is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return NONE
    return f"{value:.{digits}f}"


def speedup_text(value: object) -> str:
    """Marked where speculation is slower than plain decoding."""
    marked = isinstance(value, (int, float)) and value < 1
    return number(value) + (SLOWER if marked else "")


def published_text(value: float) -> str:
    """With every digit that it was published with, at least two."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"


def published_speedup_text(value: float) -> str:
    return published_text(value) + (SLOWER if value < 1 else "")


def quotient(record: Mapping[str, Any], numerator: str, denominator: str = "baseline_step_ms") -> float | None:
    above, below = record.get(numerator), record.get(denominator)
    return None if above is None or not below else above / below


def target_name(record: Mapping[str, Any]) -> str:
    """The published name of the record's model, where it is a published one, else its own."""
    for name in published().checkpoint_names:
        if published().is_model(name, record.get("model")):
            return name
    return str(record.get("model"))


def draft_name(record: Mapping[str, Any]) -> str:
    """ "self", or the name of the draft model, as published where it is."""
    if not record.get("draft_model"):
        return SELF
    return target_name({"model": record["draft_model"]})


def machine_name(record: Mapping[str, Any]) -> str:
    return str(record.get("gpu") or record.get("machine"))


def differences(records: Sequence[Mapping[str, Any]]) -> str:
    """Said once above a table: what was published, what was measured, and that one is not the other."""
    lines = [f"  published: {published().setting}"]
    if not records:
        return "\n".join([*lines, f"  measured:  nothing; every measured figure is {NONE!r}"])
    described = dict.fromkeys(
        f"{target_name(record)}, {_text_of(record)}, {machine_name(record)}, {record.get('dtype') or 'dtype unknown'}"
        for record in records
    )
    lines += [f"  measured:  {text}" for text in described]
    if not {target_name(record) for record in records} & published().checkpoint_names.keys():
        lines.append("  Another model on another machine: compare where the columns rise and fall, not their values.")
    return "\n".join(lines)


def _text_of(record: Mapping[str, Any]) -> str:
    if record.get("load_format") == "dummy":
        return "random weights"
    return "the built-in book" if record.get("dataset") in (None, "default") else str(record["dataset"])
