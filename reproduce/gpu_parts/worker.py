"""The process that runs a part of reproduce/gpu.py: one JSON record a line on stdout, everything else on stderr."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The checkout, and the attention cases of its tests.
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "tests"))

from reproduce.gpu_parts.cells import Cell, Options, run_cells

PARTS = {"a": "correctness", "b": "bandwidth", "c": "speculation", "d": "costs", "e": "launch_gaps"}
# The exit code that asks to be started again behind the last cell: the device no longer works in this process.
RESTART = 75


def cells_of(part: str, options: Options) -> list[Cell]:
    return importlib.import_module(f"reproduce.gpu_parts.{PARTS[part]}").cells(options)


def main() -> None:
    task = json.loads(sys.argv[1])
    index, n_process = task["share"]
    cells = cells_of(task["part"], Options(**task["options"]))[index::n_process]
    went_on = run_cells(cells[task["start"] :], task["deadline"], lambda record: print(json.dumps(record), flush=True))
    sys.stdout.flush()
    sys.exit(0 if went_on else RESTART)


if __name__ == "__main__":
    main()
