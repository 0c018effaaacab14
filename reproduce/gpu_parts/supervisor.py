"""Gives every part of reproduce/gpu.py a process, or several, and starts it again behind a cell that broke it.

Run as a program it is such a process: one JSON record a line on stdout, everything else on stderr.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread

from common.checkout import ROOT
from common.provenance import provenance
from reproduce.gpu_parts.cells import ERROR, Cell, Options, Record, run_cells
from reproduce.sweeping.child import run_child

# By the letter of a part its module, and at most which share of the time limit it has; in the order in which they run:
# what comes last is what can best be missed. What can fail is among the tests.
HERE = "reproduce.gpu_parts."
PARTS = {"a": ("gpu_correctness", 0.25), "b": (HERE + "bandwidth", 0.25), "c": (HERE + "speculation", 0.45)}
PARTS |= {"e": (HERE + "launch_gaps", 0.15), "d": (HERE + "speculation", 1.0)}
WORKER = ("-m", "reproduce.gpu_parts.supervisor")
# The exit code that asks to be started again behind the last cell: the device no longer works in this process.
RESTART = 75
# Processes that share part a on a GPU, where compiling kernels takes most of its time.
N_PROCESS = 8
# Seconds that a cell may run past its part's share, and past the end, before its process is ended; seconds
# that a process has in any case, to record the cells that it skips.
PART_GRACE, END_GRACE, START_SECONDS = 60, 8, 15
Keep = Callable[[Record], object]


@dataclass(frozen=True)
class Task:
    """Of a part's cells every n-th, share being (first, n), from the one at `start` on. No cell begins after
    `deadline`, and at `kill_at` its process is ended, both in seconds since the epoch.
    """

    part: str
    options: Options
    deadline: float
    kill_at: float
    share: tuple[int, int] = (0, 1)
    start: int = 0


def cells_of(part: str, options: Options, share: tuple[int, int] = (0, 1)) -> list[Cell]:
    """A part's cells; of a share (first, n) every n-th."""
    (first, n_share), module = share, importlib.import_module(PARTS[part][0])
    return [cell for cell in module.cells(options) if cell.part == part][first::n_share]


def work() -> None:
    """Run the cells of the task that the command line has."""
    task = json.loads(sys.argv[1])
    sys.path.append(str(ROOT / "tests"))
    cells = cells_of(task["part"], Options(**task["options"]), task["share"])[task["start"] :]
    went_on = run_cells(cells, task["deadline"], lambda record: print(json.dumps(record), flush=True))
    sys.exit(0 if went_on else RESTART)


def run_task(task: Task, keep: Keep, logs: Path, worker: Sequence[str] = WORKER) -> None:
    """Run a worker to its end, and again behind every cell that ended it; `keep` gets every record."""
    (first, n_process), n_idle = task.share, 0
    few = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // n_process))} if n_process > 1 else {}
    while n_idle < 2:  # a process that ends before its first record would do so again: at an import, say
        kept: list[Record] = []

        def hear(record: Record, kept: list[Record] = kept) -> None:
            if "cell" in record:  # not what a library prints
                keep(record)
                kept.append(record)

        log = logs / f"part_{task.part}_{first}_from_{task.start}.log"
        seconds = max(START_SECONDS, task.kill_at - time.time())
        outcome = run_child([*worker, json.dumps(asdict(task))], log, seconds, hear=hear, environment=few)
        task, n_idle = replace(task, start=task.start + len(kept)), 0 if kept else n_idle + 1
        if outcome.exit_code == 0:
            return
        if outcome.exit_code != RESTART:
            name = f"cell {task.start} of part {task.part}, process {first} of {n_process}"
            record = {"benchmark": "gpu_lost", "part": task.part, "cell": name, "status": ERROR}
            keep(record | {"error": f"its process: {outcome.error}"} | provenance())
            task = replace(task, start=task.start + 1)


def run_parts(parts: Sequence[str], options: Options, time_limit: float, keep: Keep, logs: Path) -> None:
    """Those parts, in the order of PARTS."""
    end = time.time() + time_limit
    for part in (part for part in PARTS if part in parts):
        deadline = min(end, time.time() + (PARTS[part][1] if len(parts) > 1 else 1.0) * time_limit)
        task = Task(part, options, deadline, min(end + END_GRACE, deadline + PART_GRACE))
        n_process = N_PROCESS if options.on_cuda and part == "a" else 1
        tasks = [replace(task, share=(index, n_process)) for index in range(n_process)]
        # Daemons, so that Ctrl-C ends this process, and with it its children.
        threads = [Thread(target=run_task, args=(task, keep, logs), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    work()
