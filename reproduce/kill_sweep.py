"""kill -9 of a sweep's runner, again and again: are the rows those of a run that nobody disturbed?

    python reproduce/kill_sweep.py [--kills 50] [--output reproduce/results/kill_sweep.jsonl]

Small cells that sleep and print a record. A runner is killed at a random moment and started again, until all kills
are spent and the sweep is through; a sweep that is through before is followed by a fresh one. A third of the
kills fall anywhere, a third shortly before a row is written, a third on the first sign of it in the file. Prints a
summary and last one JSON object. Exit code 1 if a row was lost, written twice or changed, or a process survived.
"""

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from common import cli
from common.checkout import ROOT
from common.errors import ConfigError, flag
from common.jsonl import is_torn, publish, read_lines, require_appendable
from common.provenance import provenance
from common.say import say
from engine.bench.config import Output
from reproduce.sweeping.cells import Cell, grid
from reproduce.sweeping.runner import logs_of

SLEEPER = "reproduce/sweeping/sleeper.py"
WRONG = ("lost", "twice", "changed", "out_of_order")
# A row is large so that writing it takes a while, in which a kill can fall.
N_CELLS, ROW_LETTERS, SLEEP_SECONDS = 30, 1_000_000, 0.05
# When a runner is killed, and so many seconds at most behind the first sign of that.
MOMENTS = {"anywhere": 0.6, "before the row": 0.02, "in the row": 0.0005}
PATIENCE_SECONDS, SURVIVAL_SECONDS = 120, 10
DIFFERENT = ("seconds", "started", "git_commit")


@dataclass(frozen=True)
class Flags(Output):
    kills: int = 50  # how often a runner is killed
    seed: int = 0  # of the moments


def sleepers(n_cells: int, size: int) -> list[Cell]:
    """Cells that sleep a while; their tag is found nowhere else on the machine."""
    fixed = {"size": size, "seconds": SLEEP_SECONDS, "tag": f"sleeper-{os.getpid()}-{time.time_ns()}"}
    return grid(SLEEPER, fixed, {"index": list(range(n_cells))})


def start_command(cells: Sequence[Cell], output: Path) -> psutil.Process:
    """Starts `reproduce/sweep.py` on these sleepers; what it says goes beside the output."""
    fixed = [f"--fixed={name}={value}" for name, value in cells[0].flags.items() if name != "index"]
    axis = "--axis=index=" + ",".join(str(cell.flags["index"]) for cell in cells)
    command = [sys.executable, str(ROOT / "reproduce" / "sweep.py"), "--script", SLEEPER, *fixed, axis]
    with output.with_suffix(".said").open("a") as said:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return psutil.Popen([*command, "--output", str(output)], env=environment, stdout=said, stderr=said)


def wait_for(runner: psutil.Process, is_so: Callable[[], bool] = lambda: False, pause: float = 0.001) -> bool:
    """Whether it came to be so before the runner was over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        with suppress(psutil.TimeoutExpired):
            runner.wait(timeout=pause)
            return False
        if time.monotonic() > deadline:
            runner.kill()
            raise RuntimeError(f"a runner neither went on nor ended for {PATIENCE_SECONDS} s")
    return True


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for_moment(
    runner: psutil.Process, moment: str, cells: Sequence[Cell], output: Path, rng: random.Random
) -> bool:
    """Return at a moment to kill at; False if the runner was over before."""
    lock, mine = logs_of(output) / "lock", f"{runner.pid}\n"
    if not wait_for(runner, lambda: lock.exists() and lock.read_text() == mine):
        return False
    delay = rng.uniform(0, MOMENTS[moment])
    if moment != "anywhere":
        # Not the first row: the log of its cell may be that of a runner that was killed.
        n_rows = len(list(read_lines(output))) + rng.randint(1, 2)
        log = logs_of(output) / f"{cells[n_rows].key}.log" if n_rows < len(cells) else None
        if log is None or not wait_for(runner, log.exists):
            return wait_for(runner)
        # What a cell printed is copied to its log just before its row is written.
        watched, size = (output, size_of(output)) if moment == "in the row" else (log, 0)
        if not wait_for(runner, lambda: size_of(watched) != size, pause=0):
            return False
        delay = rng.choice([0.0, delay])
    until = time.perf_counter() + delay
    return wait_for(runner, lambda: time.perf_counter() > until, pause=0)


def survivors(tag: object) -> tuple[int, float]:
    """How many processes with this tag, cells and guardians, stay after their runner; for how many seconds any did."""
    killed, seconds = time.monotonic(), 0.0
    while alive := sum(tag in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        seconds = time.monotonic() - killed
        if seconds > SURVIVAL_SECONDS:
            break
    return alive, seconds


def finish(runner: psutil.Process, output: Path) -> None:
    wait_for(runner, pause=0.01)
    if code := runner.wait():
        said = output.with_suffix(".said")
        words = said.read_text()[-500:] if said.exists() else ""
        raise RuntimeError(f"a runner that was left alone ended with exit code {code}: {words}")


def differences(cells: Sequence[Cell], output: Path, undisturbed: Path) -> dict[str, int]:
    """Rows that are not there, there twice, or other than those of the undisturbed run; what kills tore is none."""
    rows, same = (
        [{name: value for name, value in row.items() if name not in DIFFERENT} for _, row in read_lines(path)]
        for path in (output, undisturbed)
    )
    keys, is_cut_off = [row["key"] for row in rows], is_torn(output.read_bytes().rpartition(b"\n")[2])
    return {
        "lost": sum(cell.key not in keys for cell in cells),
        "twice": sum(count > 1 for count in Counter(keys).values()),
        "changed": sum(row not in same for row in rows) + is_cut_off,
        "out_of_order": int(keys != [cell.key for cell in cells]),
    }


def disturb(
    cells: Sequence[Cell], n_kills: int, rng: random.Random, folder: Path, start: Callable[[Path], psutil.Process]
) -> dict:
    """As many sweeps as it takes to spend all kills, each compared with an undisturbed one."""
    kills, seen, longest_survival = Counter[str](), Counter[str](), 0.0
    undisturbed = folder / "undisturbed.jsonl"
    finish(start(undisturbed), undisturbed)
    while kills.total() < n_kills:
        output = folder / f"disturbed_{seen['sweeps']}.jsonl"
        runner = start(output)
        while kills.total() < n_kills:
            moment = list(MOMENTS)[kills.total() % len(MOMENTS)]
            if not wait_for_moment(runner, moment, cells, output, rng):
                break
            size = size_of(output)
            runner.kill()
            runner.wait()
            kills[moment] += 1
            n_alive, seconds = survivors(cells[0].flags["tag"])
            longest_survival = max(longest_survival, seconds)
            is_before = moment == "before the row" and size_of(output) == size
            seen.update({"survivors": n_alive, "killed_before_the_row": is_before})
            runner = start(output)
        finish(runner, output)
        n_torn = sum(map(is_torn, output.read_bytes().split(b"\n")))
        seen.update({"sweeps": 1, "torn_rows": n_torn} | differences(cells, output, undisturbed))
        say(f"sweep {seen['sweeps']}: {kills.total()} of {n_kills} kills")
    record = {"kills": kills.total(), "kills_at": dict(kills), "sweeps": seen["sweeps"], "cells": len(cells)}
    record |= {name: seen[name] for name in ("torn_rows", "killed_before_the_row", *WRONG, "survivors")}
    return record | {"longest_survival_seconds": round(longest_survival, 3)}


def main(flags: Flags) -> None:
    if flags.kills < 1:
        raise ConfigError("nothing would be disturbed", flag("kills"), flags.kills, ">= 1", f"use {flag('kills')} 50")
    require_appendable(flags.output)
    cells = sleepers(N_CELLS, ROW_LETTERS)
    with tempfile.TemporaryDirectory() as folder:
        seen = disturb(cells, flags.kills, random.Random(flags.seed), Path(folder), partial(start_command, cells))
    summary = (
        f"{seen['kills']} kills in {seen['sweeps']} sweeps of {seen['cells']} cells: {seen['torn_rows']} rows torn, "
        f"{seen['lost']} lost, {seen['twice']} twice, {seen['changed']} changed, {seen['survivors']} processes left"
    )
    publish(flags.output, {"benchmark": "kill_sweep", "seed": flags.seed, **seen, **provenance()}, summary)
    sys.exit(any(seen[name] for name in (*WRONG, "survivors")))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
