"""kill -9 of a sweep's runner, again and again: are the rows those of a run that nobody disturbed?

    python reproduce/kill_sweep.py [--kills 50] [--output reproduce/results/kill_sweep.jsonl]

Small cells that sleep and print a record. A runner is killed at a random moment and started again, until all kills
are spent and the sweep is through; a sweep that is through before is followed by a fresh one. A third of the
kills fall anywhere, a third shortly before a row is written, a third on the first sign of it in the file. Prints a
summary and last one JSON object. Exit code 1 if a row was lost, written twice or changed, or a process survived.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

import psutil

from common.checkout import ROOT
from common.errors import ConfigError, UserError
from common.exit import exit_on_user_error
from common.jsonl import is_torn, publish, read_lines, require_appendable
from common.provenance import provenance
from engine.bench.arguments import Parser
from reproduce.sweeping.cells import Cell
from reproduce.sweeping.runner import logs_of

SLEEPER = "reproduce/sweeping/sleeper.py"
MOMENTS = ("anywhere", "before the row", "in the row")
# A row is large so that writing it takes a while, in which a kill can fall.
N_CELLS, ROW_LETTERS, SLEEP_SECONDS = 30, 1_000_000, (0.0, 0.05)
ANYWHERE_SECONDS, BEFORE_SECONDS, IN_ROW_SECONDS = 0.6, 0.02, 0.0005
PATIENCE_SECONDS = 120
DIFFERENT = ("seconds", "started", "git_commit")
Start = Callable[[Path], int]


class Runner:
    """A runner's process, a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None

    def is_over(self) -> bool:
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code is not None

    def wait_for(self, is_so: Callable[[], bool], pause: float | None = None) -> bool:
        """Whether it came to be so before the runner was over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            if self.is_over():
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise UserError(
                    "a runner neither went on nor ended",
                    where="reproduce/sweep.py",
                    seen=f"{PATIENCE_SECONDS} s without a sign",
                    required="rows",
                    fix="run it by itself and see what it says",
                )
            if pause is not None:
                time.sleep(pause)
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait_for(self.is_over, 0.0001)


@dataclass
class Tally:
    """What the kills did."""

    kills: Counter[str] = field(default_factory=Counter)
    torn_rows: int = 0
    unwritten: int = 0
    sweeps: int = 0
    longest_survival: float = 0.0
    survivors: int = 0


def sleepers(n_cells: int, size: int, rng: random.Random) -> list[Cell]:
    """Cells that sleep a random while; their tag is found nowhere else on the machine."""
    tag = f"sleeper-{os.getpid()}-{time.time_ns()}"
    return [
        Cell(SLEEPER, {"index": i, "seconds": round(rng.uniform(*SLEEP_SECONDS), 4), "size": size, "tag": tag})
        for i in range(n_cells)
    ]


def start_command(grid: Path) -> Start:
    """Starts `reproduce/sweep.py` on a grid."""

    def start(output: Path) -> int:
        command = [sys.executable, str(ROOT / "reproduce" / "sweep.py"), "--grid", str(grid), "--output", str(output)]
        said = output.with_suffix(".said")
        files = [
            (os.POSIX_SPAWN_OPEN, descriptor, str(said), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for descriptor in (1, 2)
        ]
        return os.posix_spawn(sys.executable, command, os.environ | {"OMP_NUM_THREADS": "1"}, file_actions=files)

    return start


def write_grid(cells: Sequence[Cell], path: Path) -> None:
    """Every cell a sweep of its own."""
    tables = []
    for cell in cells:
        flags = "\n".join(f"{name} = {json.dumps(value)}" for name, value in cell.flags.items())
        tables.append(f"[[sweep]]\nscript = {json.dumps(cell.script)}\n[sweep.flags]\n{flags}\n")
    path.write_text("\n".join(tables))


def rows_in(output: Path) -> list[dict]:
    """The file's rows; what kills left of others is none."""
    return [row for _, row in read_lines(output)]


def lines_in(output: Path) -> list[bytes]:
    """The lines of a file; torn ones are those that a kill cut off."""
    return output.read_bytes().split(b"\n")


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_for_moment(runner: Runner, moment: str, cells: Sequence[Cell], output: Path, rng: random.Random) -> bool:
    """Return at a moment to kill at; False if the runner was over before."""
    lock, mine = logs_of(output) / "lock", f"{runner.pid}\n"
    if not runner.wait_for(lambda: lock.exists() and lock.read_text() == mine, 0.001):
        return False
    if moment == "anywhere":
        until = time.monotonic() + rng.uniform(0, ANYWHERE_SECONDS)
        return runner.wait_for(lambda: time.monotonic() > until, 0.0005)
    # Not the first row: the log of its cell may be that of a runner that was killed.
    n_rows = len(rows_in(output)) + rng.randint(1, 2)
    if n_rows >= len(cells):
        return runner.wait_for(lambda: False, 0.001)
    log = logs_of(output) / f"{cells[n_rows].key}.log"
    if not runner.wait_for(log.exists, 0.001):
        return False
    # What a cell said is copied to its log just before its row is written.
    watched, delay = (output, IN_ROW_SECONDS) if moment == "in the row" else (log, BEFORE_SECONDS)
    size = size_of(output) if watched == output else 0
    if not runner.wait_for(lambda: size_of(watched) != size):
        return False
    until = time.perf_counter() + rng.choice([0.0, rng.uniform(0, delay)])
    while time.perf_counter() < until:
        pass
    return True


def processes_of(cells: Sequence[Cell]) -> list[psutil.Process]:
    """Those that run these cells, and their guardians."""
    tag = cells[0].flags["tag"]
    return [process for process in psutil.process_iter(["cmdline"]) if tag in (process.info["cmdline"] or [])]


def note_survivors(cells: Sequence[Cell], tally: Tally) -> None:
    """How long the killed runner's processes live on."""
    killed = time.monotonic()
    while alive := processes_of(cells):
        if time.monotonic() > killed + 10:
            tally.survivors += len(alive)
            return
        tally.longest_survival = max(tally.longest_survival, time.monotonic() - killed)


def disturbed_sweep(
    cells: Sequence[Cell], output: Path, n_kills: int, rng: random.Random, start: Start, tally: Tally
) -> None:
    """A sweep to its end, the runner being killed up to `n_kills` times and started again."""
    tally.sweeps += 1
    first = tally.kills.total()
    while True:
        runner = Runner(start(output))
        moment = MOMENTS[tally.kills.total() % len(MOMENTS)]
        spent = tally.kills.total() - first == n_kills
        if spent or not wait_for_moment(runner, moment, cells, output, rng):
            runner.wait_for(runner.is_over, 0.01)
            require_success(runner, output)
            tally.torn_rows += sum(map(is_torn, lines_in(output)))
            return
        size = size_of(output)
        runner.kill()
        tally.kills[moment] += 1
        note_survivors(cells, tally)
        tally.unwritten += moment == "before the row" and size_of(output) == size


def require_success(runner: Runner, output: Path) -> None:
    if runner.exit_code:
        said = output.with_suffix(".said")
        raise UserError(
            "a runner that was left alone failed",
            where="reproduce/sweep.py",
            seen=f"exit code {runner.exit_code}: {said.read_text()[-500:] if said.exists() else ''}",
            required="exit code 0",
            fix="run it by itself and see what it says",
        )


def differences(cells: Sequence[Cell], output: Path, undisturbed: Path) -> dict[str, int]:
    """Rows that are not there, there twice, or other than those of the undisturbed run."""
    rows = rows_in(output)
    counts = Counter(row["key"] for row in rows)
    same = {row["key"]: comparable(row) for row in rows_in(undisturbed)}
    return {
        "lost": sum(cell.key not in counts for cell in cells),
        "twice": sum(count > 1 for count in counts.values()),
        "changed": sum(comparable(row) != same.get(row["key"]) for row in rows) + is_torn(lines_in(output)[-1]),
        "out_of_order": [row["key"] for row in rows] != [cell.key for cell in cells],
    }


def comparable(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in DIFFERENT}


def disturb(
    cells: Sequence[Cell], n_kills: int, rng: random.Random, folder: Path, start: Start, progress: bool = False
) -> dict:
    """As many sweeps as it takes to spend all kills, each compared with an undisturbed one."""
    tally, wrong = Tally(), Counter[str]()
    undisturbed = folder / "undisturbed.jsonl"
    disturbed_sweep(cells, undisturbed, 0, rng, start, Tally())
    while tally.kills.total() < n_kills:
        output = folder / f"disturbed_{tally.sweeps}.jsonl"
        disturbed_sweep(cells, output, n_kills - tally.kills.total(), rng, start, tally)
        wrong.update({name: int(count) for name, count in differences(cells, output, undisturbed).items()})
        if progress:
            print(f"sweep {tally.sweeps}: {tally.kills.total()} of {n_kills} kills", file=sys.stderr, flush=True)
    return {
        "kills": tally.kills.total(),
        "kills_at": dict(tally.kills),
        "sweeps": tally.sweeps,
        "cells": len(cells),
        "torn_rows": tally.torn_rows,
        "killed_before_the_row": tally.unwritten,
        **wrong,
        "survivors": tally.survivors,
        "longest_survival_seconds": round(tally.longest_survival, 3),
    }


def is_sound(seen: dict) -> bool:
    return not any(seen[name] for name in ("lost", "twice", "changed", "out_of_order", "survivors"))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="how often a runner is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", help="append the JSON record to this file")
    args: argparse.Namespace = parser.parse_args()
    if args.kills < 1:
        raise ConfigError(
            "nothing would be disturbed", where="--kills", seen=args.kills, required=">= 1", fix="use --kills 50"
        )
    require_appendable(args.output)
    rng = random.Random(args.seed)
    cells = sleepers(N_CELLS, ROW_LETTERS, rng)
    with tempfile.TemporaryDirectory() as folder:
        grid = Path(folder) / "grid.toml"
        write_grid(cells, grid)
        seen = disturb(cells, args.kills, rng, Path(folder), start_command(grid), progress=True)
    record = {"benchmark": "kill_sweep", "seed": args.seed, **seen, **provenance()}
    summary = (
        f"{seen['kills']} kills in {seen['sweeps']} sweeps of {seen['cells']} cells: {seen['torn_rows']} rows torn, "
        f"{seen['lost']} lost, {seen['twice']} twice, {seen['changed']} changed, {seen['survivors']} processes left"
    )
    publish(args.output, record, summary)
    if not is_sound(seen):
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
