"""Runs a grid of configurations of a script, each in a process of its own, and records each once.

    python reproduce/sweep.py --grid reproduce/grids/example.toml --output results.jsonl
    python reproduce/sweep.py --script tests/selfspec_benchmark.py --fixed B=1 --axis gamma=1,2 --output results.jsonl

--fixed and --axis also stand in the place of what a file says of those flags. It can be interrupted or killed at any
point; the same command goes on with the cells that have no row yet. A cell that failed is a row with its error, and is
tried again with --retry_failed. Exit code 1 if a selected cell failed.
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from common import cli
from common.errors import ConfigError, flag
from reproduce.sweeping.cells import VALUES, Cell, Sweep, cells_of, labels, read_grid, select
from reproduce.sweeping.runner import FAILED, OK, read_rows, run_cells

WAITING = "to run"
Texts = UseAppendAction[tuple[str, ...]]
UNSET = arg(help_behavior_hint="(default: none)")


@dataclass(frozen=True)
class Flags:
    grid: Annotated[str | None, UNSET] = None  # TOML file of sweeps, such as reproduce/grids/example.toml
    script: Annotated[str | None, UNSET] = None  # without --grid: the script to run, from the project's root
    fixed: Annotated[Texts, arg(metavar="NAME=VALUE")] = ()  # a flag in the place of a sweep's own; [1,2] for several
    axis: Annotated[Texts, arg(metavar="NAME=V1,V2")] = ()  # the same, with its values; the last is fastest
    output: Annotated[str | None, arg(help_behavior_hint="(default: beside the grid's file)")] = None
    """append the rows to this file"""
    only: Annotated[Texts, arg(metavar="NAME=VALUE|KEY")] = ()  # cells with this value, or of this key
    retry_failed: bool = False  # run cells again whose last row is a failure
    timeout: Annotated[float | None, UNSET] = None  # seconds after which a cell is ended, as a failure
    list: bool = False  # show the cells and their state, and run nothing

    def cells(self) -> Sequence[Cell]:
        """Those chosen of a file of sweeps, or of a script. Errors: ConfigError."""
        if not (self.grid if self.script is None else self.output):
            what, where = "it is not clear what to run", "--grid, --script, --output"
            script = "--script tests/selfspec_benchmark.py --output sweep.jsonl"
            fix = f"give --grid reproduce/grids/example.toml, or {script}"
            raise ConfigError(what, where, self.script or "neither", "--grid, or --script and --output", fix)
        fixed = {name: value_of(text) for name, text in assigned("fixed", self.fixed).items()}
        axes = {name: values_of(text) for name, text in assigned("axis", self.axis).items()}
        sweeps = read_grid(str(self.grid)) if self.script is None else [Sweep(self.script)]
        return select(cells_of(sweeps, fixed, axes), self.only)

    @property
    def file(self) -> str:
        return self.output or str(Path(str(self.grid)).with_suffix(".jsonl"))


def value_of(text: str) -> Any:
    """A value as TOML reads it (0.5, true, [64, 128], "in quotes"), and what TOML does not read as it is."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, VALUES) else text


def values_of(text: str) -> Sequence[Any]:
    """Values between commas; lists in brackets are one value each."""
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [value_of(part.strip()) for part in text.split(",") if part.strip()]


def assigned(field: str, texts: Sequence[str]) -> dict[str, str]:
    """Of `name=value` texts. Errors: ConfigError for one without a name or a value, or a name that comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            fix = f"write {flag(field)} {'gamma=1,2' if field == 'axis' else 'gamma=3, or benchmark=true'}"
            raise ConfigError("this gives a flag no value", flag(field), text, "name=value, once for each name", fix)
        found[name] = value
    return found


def run(flags: Flags) -> bool:
    """Run the cells, or list them, and say how they ended; whether none of them has failed."""
    selected = flags.cells()
    if not flags.list:
        try:
            run_cells(selected, flags.file, retry_failed=flags.retry_failed, timeout_s=flags.timeout)
        except KeyboardInterrupt:  # the runner has said what is done
            sys.exit(130)
    rows = read_rows(flags.file)
    states = [rows[cell.key]["status"] if cell.key in rows else WAITING for cell in selected]
    for cell, state, label in zip(selected, states, labels(selected), strict=True):
        error = rows[cell.key]["error"].partition("\n")[0] if state == FAILED else ""
        if flags.list or error:
            print(f"{cell.key}  {state:<6}  {label}  {error}".rstrip())
    counted = ", ".join(f"{states.count(state)} {state}" for state in (OK, FAILED, WAITING) if state in states)
    has_failed = FAILED in states and not flags.list
    hint = "; --retry_failed runs those that failed again" if has_failed else ""
    print(f"{counted} of {len(selected)} cells in {flags.file}{hint}")
    return not has_failed


def main(flags: Flags) -> None:
    if not run(flags):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
