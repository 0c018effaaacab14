"""kill -9 of a sweep's runner at random moments, again and again: the rows are those of a run that nobody disturbed."""

import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path

import psutil
import pytest
from sweep_processes import fork, processes_of, wait_until

from common.jsonl import read_lines
from reproduce.sweeping.cells import Cell, Sweep
from reproduce.sweeping.runner import make_logs, run_cells

# When a runner is killed, and so many seconds at most behind the first sign of that.
MOMENTS = {"anywhere": 0.6, "before the row": 0.02, "in the row": 0.0005}
PATIENCE_SECONDS = 120


def comes(runner: psutil.Process, is_so: Callable[[], bool] = lambda: False, pause: float = 0.001) -> bool:
    """Whether it came to be so before the runner was over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        with suppress(psutil.TimeoutExpired):
            runner.wait(timeout=pause)
            return False
        assert time.monotonic() < deadline, "the runner neither goes on nor ends"
    return True


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def moment_comes(runner: psutil.Process, moment: str, cells: Sequence[Cell], output: Path, rng: random.Random) -> bool:
    """Return at a moment to kill at; False if the runner was over before."""
    lock, mine = make_logs(output) / "lock", f"{runner.pid}\n"
    if not comes(runner, lambda: lock.exists() and lock.read_text() == mine):
        return False
    delay = rng.uniform(0, MOMENTS[moment])
    if moment != "anywhere":
        # Not the first row: what its cell printed may be that of a runner that was killed.
        n_rows = len(list(read_lines(output))) + rng.randint(1, 2)
        printed = make_logs(output) / f"{cells[n_rows].key}.out" if n_rows < len(cells) else None
        if printed is None or not comes(runner, printed.exists):
            return comes(runner)
        # What a cell prints comes just before its row is written.
        watched, size = (output, size_of(output)) if moment == "in the row" else (printed, 0)
        if not comes(runner, lambda: size_of(watched) != size, pause=0):
            return False
        delay = rng.choice([0.0, delay])
    until = time.perf_counter() + delay
    return comes(runner, lambda: time.perf_counter() > until, pause=0)


def rows_of(output: Path) -> list[dict]:
    """All rows, in order; what kills tore is none."""
    own = ("seconds", "started", "git_commit")
    return [{name: value for name, value in row.items() if name not in own} for _, row in read_lines(output)]


# A row is large where writing it is to take a while, in which a kill can fall.
@pytest.mark.parametrize(
    "n_kills,n_cells,letters", [(5, 10, 2000), pytest.param(50, 30, 1_000_000, marks=pytest.mark.slow)]
)
def test_after_kill_9_the_rows_are_those_of_an_undisturbed_run(tmp_path, n_kills, n_cells, letters):
    script, undisturbed, rng = tmp_path / "sleeper.py", tmp_path / "undisturbed.jsonl", random.Random(0)
    shutil.copyfile(Path(__file__).with_name("sleeper.py"), script)  # whose processes are found by its name
    cells = Sweep(str(script), {"letters": letters, "seconds": 0.05}, {"index": list(range(n_cells))}).cells()
    run_cells(cells, undisturbed)
    moments, outputs = list(islice(cycle(MOMENTS), n_kills)), (tmp_path / f"disturbed_{n}.jsonl" for n in count())
    while moments:
        output = next(outputs)
        start = partial(fork, partial(run_cells, cells, output))
        runner = start()
        while moments and moment_comes(runner, moments[-1], cells, output, rng):
            runner.kill()
            runner.wait()
            moments.pop()
            wait_until(lambda: not processes_of(script))
            runner = start()
        assert runner.wait(PATIENCE_SECONDS) == 0
        assert rows_of(output) == rows_of(undisturbed) and output.read_bytes().endswith(b"\n")
