"""Runs the parts of reproduce/gpu.py in processes of their own, each started again behind a cell that ended it.

Run as a program it is such a process. What is done is in the file of records.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from common.checkout import ROOT
from common.jsonl import append_record, read_lines
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
PART_GRACE, END_GRACE, START_SECONDS = 60, 8, 30


@dataclass(frozen=True)
class Task:
    """Of a part's cells every n-th, share being (first, n), recorded in `output` under the name `run`. No cell begins
    after `deadline`, and at `kill_at` its process is ended, both in seconds since the epoch."""

    part: str
    options: Options
    run: str
    output: str
    deadline: float
    kill_at: float
    share: tuple[int, int] = (0, 1)

    def cells(self) -> list[Cell]:
        """Those that have no record yet."""
        done = {record["cell"] for record in records_of(self.output, self.run) if record["part"] == self.part}
        return [cell for cell in cells_of(self.part, self.options, self.share) if cell.name not in done]

    def keep(self, cell: Cell, result: Record) -> None:
        """Errors: ConfigError for what cannot be appended."""
        head = {"benchmark": cell.benchmark, "part": cell.part, "cell": cell.name}
        run = {"gpu_run": self.run, "quick": self.options.quick}
        append_record(self.output, provenance() | head | result | run)
        why = (result.get("error") or result.get("reason") or "").partition("\n")[0]
        print(f"{result['status']:>8}  {cell.part}  {cell.name}  {why}".rstrip(), flush=True)


def records_of(output: str, run: str) -> list[Record]:
    return [line for _, line in read_lines(output) if isinstance(line, dict) and line.get("gpu_run") == run]


def cells_of(part: str, options: Options, share: tuple[int, int] = (0, 1)) -> list[Cell]:
    """A part's cells; of a share (first, n) every n-th."""
    sys.path += [str(ROOT / "tests")] * (str(ROOT / "tests") not in sys.path)
    (first, n_share), module = share, importlib.import_module(PARTS[part][0])
    return [cell for cell in module.cells(options) if cell.part == part][first::n_share]


def run_task(task: Task, logs: Path, worker: Sequence[str] = WORKER) -> None:
    """Run a worker until every cell has a record, again behind each that ended it."""
    (first, n_process), n_idle, cells = task.share, 0, task.cells()
    few = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // n_process))} if n_process > 1 else {}
    while cells and n_idle < 2:  # a process that ends before its first record would do so again: at an import, say
        log = logs / f"part_{task.part}_{first}_{len(cells)}_left.log"
        seconds = max(START_SECONDS, task.kill_at - time.time())
        outcome = run_child([*worker, json.dumps(asdict(task))], log, seconds, environment=few)
        before, cells = len(cells), task.cells()
        n_idle = n_idle + 1 if len(cells) == before else 0
        if cells and outcome.exit_code != RESTART:
            task.keep(cells.pop(0), {"status": ERROR, "error": f"its process: {outcome.error}"})


def run_parts(parts: Sequence[str], options: Options, time_limit: float, run: str, output: str, logs: Path) -> None:
    """Those parts, in the order of PARTS. Errors: ConfigError."""
    end = time.time() + time_limit
    for part in (part for part in PARTS if part in parts):
        deadline = min(end, time.time() + (PARTS[part][1] if len(parts) > 1 else 1.0) * time_limit)
        task = Task(part, options, run, output, deadline, min(end + END_GRACE, deadline + PART_GRACE))
        n_process = N_PROCESS if options.on_cuda and part == "a" else 1
        tasks = [replace(task, share=(index, n_process)) for index in range(n_process)]
        ThreadPool(n_process).map(partial(run_task, logs=logs), tasks)  # of daemons, so that Ctrl-C ends them


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    task = Task(**given | {"options": Options(**given["options"])})
    sys.exit(0 if run_cells(task.cells(), task.deadline, task.keep) else RESTART)
