"""The process that runs parts of reproduce/gpu.py: one JSON record a line on stdout, everything else on stderr."""

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


def cells_of(parts: list[str], options: Options, share: tuple[int, int] = (0, 1)) -> list[Cell]:
    """The parts' cells in order; of several shares, every n-th cell."""
    cells = []
    for part in parts:
        module = importlib.import_module(f"reproduce.gpu_parts.{PARTS[part]}")
        cells += module.cells(options)
    return cells[share[0] :: share[1]]


def main() -> None:
    task = json.loads(sys.argv[1])
    cells = cells_of(task["parts"], Options(**task["options"]), tuple(task["share"]))

    def emit(index: int, record: dict) -> None:
        print(json.dumps({"index": index, "record": record}), flush=True)

    if not run_cells(cells, task["deadline"], emit, task["start"]):
        sys.stdout.flush()
        sys.exit(RESTART)


if __name__ == "__main__":
    main()
