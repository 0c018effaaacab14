"""Run a grid of configurations of a script, each in a separate process, and append a row for each as it ends.

    python -m reproduce.sweep --grid reproduce/grids/example.toml --output sweep.jsonl
    python -m reproduce.sweep --script tests/selfspec_benchmark.py --fixed B=1 --axis gamma=1,2 --output sweep.jsonl

A row is a line of JSON: the script, its flags, and the record that it printed last. Interrupted at any point, the same
command goes on with the cells that have not succeeded yet. Sweeps that run at the same time need an output file each.
--fixed and --axis replace the values that a grid's file gives for those flags. Exit code 1 if a cell failed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tyro.conf import UseAppendAction

from bench.draft_flags import parse_value
from common import cli
from common.checkout import ROOT
from common.errors import DataError, flag, refuse
from common.jsonl import append_record, read_lines, require_appendable
from common.say import say
from reproduce.helpers.records import parse_values


@dataclass(frozen=True)
class Flags:
    output: str  # append the rows to this file
    grid: str | None = None  # TOML file of tables [[sweep]], such as reproduce/grids/example.toml
    script: str | None = None  # without --grid: the script to run, from the project's root
    fixed: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, a flag of every cell; [1,2] for several values
    axis: UseAppendAction[tuple[str, ...]] = ()  # NAME=V1,V2, a flag and the values to try; the last varies fastest
    timeout: float | None = None  # seconds after which a cell is killed and has failed


class Cell(NamedTuple):
    """A configuration of a script. flags: True is a flag without a value, False leaves it out, a list is several
    values."""

    script: str
    flags: dict[str, Any]

    def words(self) -> list[str]:
        """Return the arguments of Python that run the cell. A benchmark that samples runs in the coupled mode unless a
        flag names another, so that all cells decode one text."""
        module = ["-m", self.script.removesuffix(".py").replace("/", ".")]
        words = [self.script] if os.path.isabs(self.script) else module
        if self.script.endswith("_benchmark.py") and self.flags.get("temperature"):
            words += [] if "verification" in self.flags else ["--verification=coupled"]
        for name, value in sorted(self.flags.items()):
            many = [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
            words += [f"--{name}"] if value is True else many
        return words

    def __str__(self) -> str:
        return " ".join(self.words())


def parse_ranges(fixed: Sequence[str], axes: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values to try of every flag of `name=value` and `name=v1,v2` texts. Errors: ConfigError."""
    found: dict[str, list[Any]] = {}
    for field, text in (*(("fixed", text) for text in fixed), *(("axis", text) for text in axes)):
        name, _, value = text.partition("=")
        if not name or not value:
            refuse(field, text, "name=value", "a flag has no value", f"write {flag(field)} gamma=3")
        if name in found:
            refuse(field, name, "every flag once", "a flag is given twice", "leave out all but one")
        found[name] = parse_values(value) if field == "axis" else [parse_value(value)]
    return found


def read_grid(path: str) -> list[tuple[str, dict[str, list[Any]]]]:
    """Return the script of each table [[sweep]], and the values of its `flags` and `axes`. Errors: ConfigError."""

    def table(script: str, flags: Mapping[str, Any] = {}, axes: Mapping[str, list[Any]] = {}) -> tuple[str, dict]:
        if not all(isinstance(values, list) for values in axes.values()):
            raise TypeError("an axis has no list of values")
        return script, {name: [value] for name, value in flags.items()} | {**axes}

    try:  # a misspelt key of a table is an argument that nothing takes
        grid = tomllib.loads(Path(path).read_text())
        if [*grid] != ["sweep"]:
            raise ValueError(f"tables: {', '.join(grid) or 'none'}")
        return [table(**each) for each in grid["sweep"]]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        required = 'tables [[sweep]] with script = "...", flags, and axes of lists'
        refuse(Path(path), error, required, "the grid cannot be read", "see reproduce/grids/example.toml")


def make_cells(sweeps: Sequence[tuple[str, Mapping[str, list]]], given: Mapping[str, list]) -> list[Cell]:
    """Return every combination of values. `given` replaces the values of the sweeps that have the flag, and is added to
    all where none has it."""
    cells, known = [], {name for _, ranges in sweeps for name in ranges}
    for script, ranges in sweeps:
        values = {**ranges, **{name: each for name, each in given.items() if name in ranges or name not in known}}
        for point in product(*values.values()):
            pairs = zip(values, point, strict=True)
            cells.append(Cell(script, {name: value for name, value in pairs if value is not False}))
    return cells


def check_flags(cells: Sequence[Cell]) -> None:
    """Raise ConfigError if a script of this project has a flag in a cell that its --help does not list."""
    for script in {cell.script for cell in cells if not os.path.isabs(cell.script)}:
        command = [sys.executable, *Cell(script, {"help": True}).words()]
        helped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if helped.returncode:
            seen = "\n".join(helped.stderr.splitlines()[-1:])
            refuse(Path(script), seen, "a script with --help", "a script does not start", "correct its name")
        given = {name for cell in cells if cell.script == script for name in cell.flags}
        if unknown := sorted(given.difference(re.findall(r"--(\w+)", helped.stdout))):
            required, fix = "flags that its --help lists", "correct the name"
            refuse(Path(script), f"--{unknown[0]}", required, "a script has no such flag", fix)


def read_states(path: str) -> dict[str, str]:
    """Return the last status of each cell of the output file, if it exists. Errors: DataError."""
    states = {}
    for number, row in read_lines(path) if os.path.exists(path) else ():
        try:
            states[str(Cell(row["script"], row["flags"]))] = row["status"]
        except (KeyError, TypeError):
            what, fix = "a line is not a sweep's", "name a sweep's file, or a new file"
            refuse(f"{path}, line {number}", str(row)[:80], "script, flags, status", what, fix, DataError)
    return states


def run_cell(cell: Cell, log: Path, timeout: float | None) -> dict[str, Any]:
    """Run a cell to its end and return its row. Messages on its stderr go to `log`."""
    began, out, error, record = time.monotonic(), b"", None, None
    with log.open("wb") as file:
        # A new session: Ctrl-C reaches the sweep alone, and all processes that the cell starts end with it.
        command, pipes = [sys.executable, *cell.words()], {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=ROOT, stderr=file, start_new_session=True, **pipes)
        try:
            out = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            error = f"timed out after {timeout} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with suppress(ValueError, IndexError):
        record = json.loads(out.splitlines()[-1])
    if error is None and (process.returncode or not isinstance(record, dict)):
        last_lines = log.read_text(errors="replace").splitlines()[-8:]
        error = "\n".join([*last_lines, f"exit code {process.returncode}; see {log}"])
    row = {"status": "failed" if error else "ok", "error": error, "record": None if error else record}
    return cell._asdict() | row | {"seconds": round(time.monotonic() - began, 1)}


def main(flags: Flags) -> None:
    if (flags.grid is None) == (flags.script is None):
        fix = "give --grid reproduce/grids/example.toml, or --script tests/selfspec_benchmark.py"
        refuse("script", flags.script, "a grid or a script", "it is not clear what to run", fix)
    require_appendable(flags.output)
    sweeps = read_grid(flags.grid) if flags.grid else [(str(flags.script), {})]
    cells = {str(cell): cell for cell in make_cells(sweeps, parse_ranges(flags.fixed, flags.axis))}
    states = read_states(flags.output)
    waiting = [name for name in cells if states.get(name) != "ok"]
    check_flags([cells[name] for name in waiting])
    (logs := Path(f"{flags.output}.logs")).mkdir(exist_ok=True)
    policies = {str(policy) for cell in cells.values() if (policy := cell.flags.get("draft_policy"))}
    if len(policies) > 1 and "full" not in policies:
        say("note: add full to the axis draft_policy: its acceptance is the ceiling of the other policies")
    say(f"{len(cells) - len(waiting)} of {len(cells)} cells have a row in {flags.output}")
    for number, name in enumerate(waiting, 1):
        say(f"[{number} of {len(waiting)}]  {name}")
        file_name = re.sub(r"[^\w.=-]", "_", name)[:200]
        row = run_cell(cells[name], logs / f"{file_name}.log", flags.timeout)
        append_record(flags.output, row)
        states[name] = row["status"]
        say(f"    {row['status']} in {row['seconds']} s\n{row['error'] or ''}".rstrip())
    n_failed = sum(states[name] != "ok" for name in cells)
    print(f"{len(cells) - n_failed} ok, {n_failed} failed of {len(cells)} cells in {flags.output}")
    if n_failed:
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a cell ends with the sweep
    cli.run(main, Flags)
