"""The process that runs a part of reproduce/gpu.py: one JSON record a line on stdout, everything else on stderr."""

from __future__ import annotations

import importlib
import json
import sys

from common.checkout import ROOT
from reproduce.gpu_parts.cells import Cell, Options, run_cells

# By the letter of a part its module, and at most which share of the time limit it has; in the order in which they run:
# what comes last is what can best be missed.
PARTS = {
    "a": ("correctness", 0.25),
    "b": ("bandwidth", 0.25),
    "c": ("speculation", 0.45),
    "e": ("launch_gaps", 0.15),
    "d": ("costs", 1.0),
}
# The exit code that asks to be started again behind the last cell: the device no longer works in this process.
RESTART = 75


def cells_of(part: str, options: Options, share: tuple[int, int] = (0, 1)) -> list[Cell]:
    """A part's cells; of a share (first, n) every n-th."""
    first, n_share = share
    return importlib.import_module(f"reproduce.gpu_parts.{PARTS[part][0]}").cells(options)[first::n_share]


def main() -> None:
    task = json.loads(sys.argv[1])
    sys.path.append(str(ROOT / "tests"))  # for the attention cases of the tests
    cells = cells_of(task["part"], Options(**task["options"]), task["share"])[task["start"] :]
    went_on = run_cells(cells, task["deadline"], lambda record: print(json.dumps(record), flush=True))
    sys.exit(0 if went_on else RESTART)


if __name__ == "__main__":
    main()
