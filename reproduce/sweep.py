"""Run a grid of configurations of a script, each in a process of its own, and append a row for each as it ends.

    python -m reproduce.sweep --grid reproduce/grids/example.toml --output sweep.jsonl
    python -m reproduce.sweep --script tests/selfspec_benchmark.py --fixed B=1 --axis gamma=1,2 --output sweep.jsonl

A row is a line of JSON: the script, its flags, and the record that it printed last. Interrupted at any point, the same
command goes on with the cells that have not succeeded yet. Sweeps that run at the same time need an output file each.
--fixed and --axis replace what a grid's file gives for those flags. Exit code 1 if a cell failed.
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

from common import cli
from common.checkout import ROOT
from common.errors import ConfigError, flag
from common.jsonl import append_record, read_lines, require_appendable
from common.say import say


@dataclass(frozen=True)
class Flags:
    output: str  # append the rows to this file
    grid: str | None = None  # TOML file of tables [[sweep]], such as reproduce/grids/example.toml
    script: str | None = None  # without --grid: the script to run, from the project's root
    fixed: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, a flag of every cell; [1,2] for several values
    axis: UseAppendAction[tuple[str, ...]] = ()  # NAME=V1,V2, a flag and the values to try; the last varies fastest
    timeout: float | None = None  # seconds after which a cell is killed and has failed


class Cell(NamedTuple):
    """One configuration. flags: True is a flag without a value, False leaves it out, a list is several values."""

    script: str
    flags: dict[str, Any]

    def words(self) -> list[str]:
        """Return the arguments of Python that run the cell."""
        module = ["-m", self.script.removesuffix(".py").replace("/", ".")]
        words = [self.script] if os.path.isabs(self.script) else module
        for name, value in self.flags.items():
            many = [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
            words += [f"--{name}"] if value is True else many
        return words

    def __str__(self) -> str:
        return " ".join(self.words())


def parse(text: str) -> Any:
    """Return a value as TOML reads it (0.5, true, [64, 128], "quoted"), or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_ranges(fixed: Sequence[str], axes: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values to try of every flag of `name=value` and `name=v1,v2` texts. Errors: ConfigError."""
    found = {}
    for field, text in (*(("fixed", text) for text in fixed), *(("axis", text) for text in axes)):
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError("a flag has no value", flag(field), text, "name=value", f"write {flag(field)} gamma=3")
        values = parse(f"[{value}]") if field == "axis" else [parse(value)]
        found[name] = values if isinstance(values, list) else [parse(part.strip()) for part in value.split(",")]
    return found


def read_grid(path: str) -> list[tuple[str, dict[str, list[Any]]]]:
    """Return the script of each table [[sweep]], and the values of its `flags` and `axes`. Errors: ConfigError."""
    try:
        sweeps = tomllib.loads(Path(path).read_text())["sweep"]
        fixed = [{name: [value] for name, value in sweep.get("flags", {}).items()} for sweep in sweeps]
        return [(sweep["script"], ranges | sweep.get("axes", {})) for sweep, ranges in zip(sweeps, fixed, strict=True)]
    except (OSError, ValueError, KeyError) as error:
        required = 'tables [[sweep]] with script = "...", flags and axes'
        raise ConfigError("the grid cannot be read", path, error, required, "see grids/example.toml") from None


def make_cells(sweeps: Sequence[tuple[str, Mapping[str, list]]], given: Mapping[str, list]) -> list[Cell]:
    """Return every combination of values. `given` replaces the values of the sweeps that have the flag, and is added to
    all where none has it. A benchmark that samples decodes in the coupled mode unless a flag names another, so that all
    cells decode one text."""
    cells, known = [], {name for _, ranges in sweeps for name in ranges}
    for script, ranges in sweeps:
        values = {**ranges, **{name: each for name, each in given.items() if name in ranges or name not in known}}
        for point in product(*values.values()):
            flags = {name: value for name, value in zip(values, point, strict=True) if value is not False}
            if script.endswith("_benchmark.py") and flags.get("temperature"):
                flags = {"verification": "coupled"} | flags
            cells.append(Cell(script, flags))
    return cells


def run_cell(cell: Cell, log: Path, timeout: float | None) -> dict[str, Any]:
    """Run a cell to its end and return its row. What it prints on stderr goes to `log`."""
    began, out, error, record = time.monotonic(), b"", None, None
    with log.open("wb") as file:
        # A session of its own: Ctrl-C reaches the sweep alone, and whatever the cell started ends with it.
        process = subprocess.Popen(
            [sys.executable, *cell.words()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
        )
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
        raise ConfigError("it is not clear what to run", flag("script"), flags.script, "a grid or a script", fix)
    require_appendable(flags.output)
    sweeps = read_grid(flags.grid) if flags.grid else [(str(flags.script), {})]
    cells = make_cells(sweeps, parse_ranges(flags.fixed, flags.axis))
    states = {str(Cell(row["script"], row["flags"])): row["status"] for _, row in read_lines(flags.output)}
    waiting = [cell for cell in cells if states.get(str(cell)) != "ok"]
    (logs := Path(f"{flags.output}.logs")).mkdir(exist_ok=True)
    say(f"{len(cells) - len(waiting)} of {len(cells)} cells have a row in {flags.output}")
    for number, cell in enumerate(waiting, 1):
        say(f"[{number} of {len(waiting)}]  {cell}")
        name = re.sub(r"[^\w.=-]", "_", str(cell))[:200]
        try:
            row = run_cell(cell, logs / f"{name}.log", flags.timeout)
        except KeyboardInterrupt:
            say("interrupted; the same command goes on")
            sys.exit(130)
        append_record(flags.output, row)
        states[str(cell)] = row["status"]
        say(f"    {row['status']} in {row['seconds']} s\n{row['error'] or ''}".rstrip())
    n_failed = sum(states[str(cell)] != "ok" for cell in cells)
    print(f"{len(cells) - n_failed} ok, {n_failed} failed of {len(cells)} cells in {flags.output}")
    if n_failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
