"""Runs a grid of configurations of a script, each in a process of its own, and records each once.

    python reproduce/sweep.py --grid reproduce/grids/example.toml --output results.jsonl
    python reproduce/sweep.py --script tests/selfspec_benchmark.py --fixed B=1 --axis gamma=1,2 --output results.jsonl

It can be interrupted or killed at any point; the same command goes on with the cells that have no row yet. A cell
that failed is a row with its error, and is tried again with --retry_failed. Exit code 1 if a selected cell failed.
"""

import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tyro.conf import UseAppendAction, arg

from common import cli
from common.errors import ConfigError, flag
from common.jsonl import require_appendable
from reproduce.sweeping.cells import Cell, grid, is_value, labels, read_grid, select
from reproduce.sweeping.runner import FAILED, OK, read_rows, run_cells

WAITING = "to run"
Texts = UseAppendAction[tuple[str, ...]]
UNSET = arg(help_behavior_hint="(default: none)")


@dataclass(frozen=True)
class Flags:
    grid: Annotated[str | None, UNSET] = None  # TOML file of sweeps, such as reproduce/grids/example.toml
    script: Annotated[str | None, UNSET] = None  # without --grid: the script to run, from the project's root
    fixed: Annotated[Texts, arg(metavar="NAME=VALUE")] = ()  # a flag of every cell; [1,2] for several
    axis: Annotated[Texts, arg(metavar="NAME=V1,V2")] = ()  # a flag and its values; the last is fastest
    output: Annotated[str | None, arg(help_behavior_hint="(default: beside the grid's file)")] = None
    """append the rows to this file"""
    only: Annotated[Texts, arg(metavar="NAME=VALUE|KEY")] = ()  # cells with this value, or of this key
    retry_failed: bool = False  # run cells again whose last row is a failure
    timeout: Annotated[float | None, UNSET] = None  # seconds after which a cell is ended, as a failure
    list: bool = False  # show the cells and their state, and run nothing


def cells_of(flags: Flags) -> list[Cell]:
    """Those of a file of sweeps, or of a script with `name=value` texts. Errors: ConfigError if both or neither."""
    if (flags.grid is None) == (flags.script is None) or (flags.grid and (flags.fixed or flags.axis)):
        given = [flag(name) for name in ("grid", "script", "fixed", "axis") if getattr(flags, name)]
        what, required = "it is not clear what to run", "--grid alone, or --script with --fixed and --axis"
        fix = "give --grid reproduce/grids/example.toml, or --script tests/selfspec_benchmark.py --axis gamma=1,2"
        raise ConfigError(what, "--grid, --script", " and ".join(given) or "neither", required, fix)
    if flags.script is None:
        return read_grid(str(flags.grid))
    return grid(flags.script, assigned("fixed", flags.fixed, parse_value), assigned("axis", flags.axis, parse_axis))


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


def assigned(field: str, texts: Sequence[str], parse: Callable[[str], Any]) -> dict[str, Any]:
    """Of `name=value` texts. Errors: ConfigError for one without a name or a value, or a name that comes twice."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            what = "a flag is given twice" if name in found else "a flag has no name or no value"
            fix = f"write {flag(field)} {'gamma=1,2' if field == 'axis' else 'gamma=3, or benchmark=true'}"
            raise ConfigError(what, flag(field), text, "name=value, once for each name", fix)
        found[name] = parse(value)
    return found


def main(flags: Flags) -> None:
    cells = cells_of(flags)
    if flags.output is None and flags.grid is None:
        required, fix = "a file, where the grid does not come from one", f"add {flag('output')} results.jsonl"
        raise ConfigError("there is no file for the rows", flag("output"), "nothing", required, fix)
    output = flags.output or str(Path(str(flags.grid)).with_suffix(".jsonl"))
    selected = select(cells, flags.only)
    require_appendable(output)
    if not flags.list:
        try:
            run_cells(cells, output, retry_failed=flags.retry_failed, timeout_s=flags.timeout, only=flags.only)
        except KeyboardInterrupt:  # the runner has said what is done
            sys.exit(130)
    rows = read_rows(output)
    states = [rows[cell.key]["status"] if cell.key in rows else WAITING for cell in selected]
    for cell, state, label in zip(selected, states, labels(selected), strict=True) if flags.list else ():
        error = rows[cell.key]["error"].partition("\n")[0] if state == FAILED else ""
        print(f"{cell.key}  {state:<6}  {label}  {error}".rstrip())
    counted = ", ".join(f"{states.count(state)} {state}" for state in (OK, FAILED, WAITING) if state in states)
    has_failed = FAILED in states and not flags.list
    hint = "; --retry_failed runs those that failed again" if has_failed else ""
    print(f"{counted} of {len(selected)} cells in {output}{hint}")
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
