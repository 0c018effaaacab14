"""What the scripts of published tables and figures share: where their records go, and how these are shown."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from common.checkout import ROOT
from reproduce import sweep
from reproduce.paper import figures
from reproduce.paper.figures import Figure
from reproduce.paper.published import Record
from reproduce.sweeping.runner import OK, read_rows

# Where records and figures go that nobody named a place for; git ignores it.
REPRODUCTION, GRIDS = ROOT / "reproduction", ROOT / "reproduce" / "grids"
SPEEDUPS, ACCEPTANCE, COST_MODEL = "speedups.jsonl", "acceptance.jsonl", "cost_model.jsonl"


@dataclass(frozen=True)
class Flags(sweep.Flags):
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figures, as PNG and SVG
    all: bool = False  # show every record in --output, not only those of these cells


def showing(
    file: str, table: Callable[[list[Record]], str], drawings: Mapping[str, Callable[[list[Record]], Figure]]
) -> tuple[Callable[[Any], None], Any]:
    """Of a script: what measures a grid's cells into that file and shows them, as a text and figures; and its flags."""

    @dataclass(frozen=True)
    class Own(Flags):
        grid: str | None = str((GRIDS / file).with_suffix(".toml"))  # TOML file of sweeps
        output: str | None = str(REPRODUCTION / file)  # append the rows to this file

    return lambda flags: present(flags, table, drawings), Own


def present(
    flags: Flags, table: Callable[[list[Record]], str], drawings: Mapping[str, Callable[[list[Record]], Figure]]
) -> None:
    """Measure the cells that have no record yet, draw the figures, print the tables; exit code 1 if a cell failed.
    Where every cell failed, the figures that are there stay as they are."""
    make_ready(flags.file, draws=not flags.list)
    went_well = sweep.run(flags)
    cells = () if flags.list else {cell.key for cell in flags.cells()}
    rows = read_rows(flags.file)
    shown = [row for key, row in rows.items() if key in cells or flags.all]
    if records := [row["record"] for row in shown if row["status"] == OK]:
        drawn = [figures.save(draw(records), name, Path(flags.figures)) for name, draw in drawings.items()]
        print(f"\n{table(records)}", "", *(f"  {path}" for path in chain(*drawn)), sep="\n")
    if not went_well:
        sys.exit(1)


def make_ready(output: str, draws: bool = True) -> None:
    """Before anything is measured: figures can be drawn, and records have their folder. Errors: ConfigError."""
    if draws:
        figures.require_matplotlib()
    if Path(output).parent == REPRODUCTION:
        with suppress(OSError):  # where it cannot be made, the output is refused
            REPRODUCTION.mkdir(exist_ok=True)
