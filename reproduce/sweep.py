"""Runs a grid of configurations of a script, each in a process of its own, and records each once.

    python reproduce/sweep.py --grid reproduce/grids/example.toml --output results.jsonl
    python reproduce/sweep.py --script tests/selfspec_benchmark.py --fixed B=1 --axis gamma=1,2 --output results.jsonl

It can be interrupted or killed at any point; the same command goes on with the cells that have no row yet. A cell
that failed is a row with its error, and is tried again with --retry_failed. Exit code 1 if a selected cell failed.
"""

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from engine.bench.arguments import Parser

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import require_appendable
from reproduce.sweeping.cells import Cell, grid, is_value, labels, read_grid, select
from reproduce.sweeping.runner import FAILED, OK, read_rows, run_cells

WAITING = "to run"


def cells_of(file: str | None, script: str | None, fixed: Sequence[str], axis: Sequence[str]) -> list[Cell]:
    """The cells of a file of sweeps, or of a script with `name=value` and `name=value,value` texts.

    Errors: ConfigError, also if it is both or neither.
    """
    if (file is None) == (script is None) or (file and (fixed or axis)):
        given = {"grid": file, "script": script, "fixed": fixed, "axis": axis}
        raise ConfigError(
            "it is not clear what to run",
            where="--grid, --script",
            seen=" and ".join(f"--{name}" for name, value in given.items() if value) or "neither",
            required="--grid alone, or --script with --fixed and --axis",
            fix="give --grid reproduce/grids/example.toml, or --script tests/selfspec_benchmark.py --axis gamma=1,2",
        )
    if script is None:
        return read_grid(str(file))
    values = {name: parse_value(text) for name, text in split_assignments("fixed", fixed).items()}
    axes = {name: parse_axis(text) for name, text in split_assignments("axis", axis).items()}
    return grid(script, values, axes)


def default_output(file: str | None) -> str:
    """Beside the grid's file a `.jsonl` of its name. Errors: ConfigError without a grid."""
    if file is None:
        what, required = "there is no file for the rows", "a file, where the grid does not come from one"
        raise ConfigError(what, where="--output", seen="nothing", required=required, fix="add --output results.jsonl")
    return str(Path(file).with_suffix(".jsonl"))


def parse_value(text: str) -> object:
    """A value as TOML reads it (0.5, true, [64, 128], "in quotes"), and what TOML does not read as it is."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if is_value(value) else text


def parse_axis(text: str) -> list[object]:
    """Values between commas; lists in brackets are one value each."""
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [parse_value(part.strip()) for part in text.split(",") if part.strip()]
    return list(values if all(map(is_value, values)) else text.split(","))


def split_assignments(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """`name=value` texts. Errors: ConfigError for one without a name or a value, or a name that comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            what = "a flag is given twice" if name in found else "a flag has no name or no value"
            fix = f"write --{flag} gamma=1,2" if flag == "axis" else f"write --{flag} gamma=3, or benchmark=true"
            raise ConfigError(what, where=f"--{flag}", seen=text, required="name=value, once for each name", fix=fix)
        found[name] = value
    return found


def print_states(cells: Sequence[Cell], output: str) -> None:
    rows = read_rows(output)
    states = [rows[cell.key]["status"] if cell.key in rows else WAITING for cell in cells]
    for cell, state, label in zip(cells, states, labels(cells), strict=True):
        error = rows[cell.key]["error"].partition("\n")[0] if state == FAILED else ""
        print(f"{cell.key}  {state:<6}  {label}  {error}".rstrip())
    print(f"{counted(states)} of {len(cells)} cells in {output}")


def counted(states: Sequence[str]) -> str:
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in (OK, FAILED, WAITING) if counts[state])


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--grid", help="TOML file of sweeps, such as reproduce/grids/example.toml")
    add("--script", help="without --grid: the script to run, from the project's root")
    add("--fixed", metavar="NAME=VALUE", action="append", default=[], help="a flag of every cell; [1,2] for several")
    add("--axis", metavar="NAME=V1,V2", action="append", default=[], help="a flag and its values; the last is fastest")
    add("--output", help="append the rows to this file (default: beside the grid's file)")
    add("--only", metavar="NAME=VALUE|KEY", action="append", default=[], help="cells with this value, or of this key")
    add("--retry_failed", action="store_true", help="run cells again whose last row is a failure")
    add("--timeout", type=float, help="seconds after which a cell is ended, as a failure")
    add("--list", action="store_true", help="show the cells and their state, and run nothing")
    args = parser.parse_args(argv)
    cells = cells_of(args.grid, args.script, args.fixed, args.axis)
    output = args.output or default_output(args.grid)
    selected = select(cells, args.only)
    require_appendable(output)
    if args.list:
        print_states(selected, output)
        return
    try:
        rows = run_cells(cells, output, retry_failed=args.retry_failed, timeout_s=args.timeout, only=args.only)
    except KeyboardInterrupt:  # the runner has said what is done
        sys.exit(130)
    all_states = {row["key"]: row["status"] for row in rows}
    states = [all_states[cell.key] for cell in selected]
    hint = "; --retry_failed runs those that failed again" if FAILED in states else ""
    print(f"{counted(states)} of {len(selected)} cells in {output}{hint}")
    if FAILED in states:
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
