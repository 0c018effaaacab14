"""Everything that a GPU has to show, in one command: correctness, bandwidth, speculation, costs, launch gaps.

    python reproduce/gpu.py --output reproduce/results/gpu.jsonl

Parts: (a) every attention backend against float64, random numbers, quantised layers, what a prompt's chunk attends
in, replayed rounds; (b) how fast backends read a KV cache, and linear layers their weights; (c) speculation beside
plain decoding on the default model and book; (d) costs of 8B and 7B shapes with random weights; (e) what of a round
is no kernel. Rows that do not fit into memory are left out, and the record says so. Every finished cell is appended
at once, one that breaks as a record of its error. Each part runs in a process of its own, which is started again
behind a cell that broke the device. Exit code 1 if a check failed or a cell broke.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

import torch

from common.errors import ConfigError, UserError
from common.exit import exit_on_user_error
from common.jsonl import append_or_put_off, require_appendable
from common.provenance import provenance
from engine.bench.arguments import Parser
from reproduce.gpu_parts.cells import DONE, ERROR, SKIPPED, Options
from reproduce.gpu_parts.worker import PARTS, RESTART

WORKER = (sys.executable, str(Path(__file__).parent / "gpu_parts" / "worker.py"))
# In this order, and with at most this share of the time limit each: what comes last is what can best be missed.
SHARES = {"a": 0.25, "b": 0.25, "c": 0.45, "e": 0.15, "d": 1.0}
# Processes that share part a on a GPU, where compiling kernels takes most of its time.
N_PROCESS = 8
# Seconds that a cell may run past its part's share, and past the end, before its process is ended; seconds
# that a process has in any case, to record the cells that it skips.
PART_GRACE, END_GRACE, START_SECONDS = 60, 8, 15
LAST_LINES = 8


def resolve_options(device: str, quick: bool) -> Options:
    """Errors: ConfigError on a machine without a GPU, unless a quick run on the CPU is asked for."""
    if torch.cuda.is_available() if device.startswith("cuda") else device == "cpu" and quick:
        return Options(device, quick)
    raise ConfigError(
        "the measurements need a GPU",
        where="reproduce/gpu.py: --device",
        seen=f"{device}{' --quick' if quick else ''}, "
        f"{'a' if torch.cuda.is_available() else 'no'} CUDA device that PyTorch {torch.__version__} sees",
        required="a CUDA device, or --device cpu --quick",
        fix="run it on a machine with a GPU and a CUDA build of PyTorch; --device cpu --quick shows that it runs",
    )


def run_worker(task: dict, keep: Callable[[dict], None], command: Sequence[str] = WORKER, **environment: str) -> None:
    """Run a worker to its end, and again behind every cell that broke its device; `keep` gets every record."""
    while True:
        ended = _run_once(task, keep, command, environment)
        is_idle = ended.n_done == task["start"]
        task = task | {"start": ended.n_done}
        if ended.exit_code and ended.exit_code != RESTART:
            keep(_lost_cell(task, f"its process ended with code {ended.exit_code}", ended.said))
            task["start"] += 1
        # A process that ends before its first record would do so again: at an import, say.
        if not ended.exit_code or (is_idle and task["attempts"] == 1):
            return
        task["attempts"] = 1 if is_idle else 0


class Ended(NamedTuple):
    """A worker's end: the index behind its last record, its exit code, and the last lines that it said."""

    n_done: int
    exit_code: int
    said: list[str]


def _run_once(task: dict, keep: Callable[[dict], None], command: Sequence[str], environment: dict[str, str]) -> Ended:
    process = subprocess.Popen(
        [*command, json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TQDM_MININTERVAL": "30"} | environment,
        errors="replace",
    )
    assert process.stdout is not None and process.stderr is not None
    killer = threading.Timer(max(START_SECONDS, task["kill_at"] - time.time()), process.kill)
    said: list[str] = []
    listener = threading.Thread(target=_listen, args=(process.stderr, said), daemon=True)
    killer.start()
    listener.start()
    n_done = task["start"]
    for line in process.stdout:
        try:
            message = json.loads(line)
            n_done, record = message["index"] + 1, message["record"]
        except (ValueError, TypeError, KeyError):
            sys.stderr.write(line)  # printed by a library
            continue
        keep(record)
    exit_code = process.wait()
    killer.cancel()
    listener.join(timeout=START_SECONDS)
    return Ended(n_done, exit_code, said)


def _listen(lines: Iterable[str], said: list[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
        said[:] = [*said, line.rstrip()][-LAST_LINES:]


def _lost_cell(task: dict, what: str, said: list[str]) -> dict:
    name = f"cell {task['start']} of part {' '.join(task['parts'])}, process {task['share'][0]} of {task['share'][1]}"
    record = {"benchmark": "gpu_lost", "part": task["parts"][0], "cell": name, "status": ERROR, "error": what}
    return record | {"where": said} | provenance()


def run_parts(parts: list[str], options: Options, time_limit: float, keep: Callable[[dict], None]) -> None:
    """All parts, in the order of SHARES; on a CPU in one process, since nothing there can break a device."""
    end = time.time() + time_limit
    ordered = [part for part in SHARES if part in parts]
    for group in [[part] for part in ordered] if options.on_cuda else [ordered]:
        share = SHARES[group[0]] if len(ordered) > len(group) else 1.0
        deadline = min(end, time.time() + share * time_limit)
        kill_at = min(end + END_GRACE, deadline + PART_GRACE)
        task = {"parts": group, "options": asdict(options), "deadline": deadline, "kill_at": kill_at}
        task |= {"start": 0, "attempts": 0}
        n_process = N_PROCESS if options.on_cuda and group == ["a"] else 1
        few = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // n_process))} if n_process > 1 else {}
        threads = [
            threading.Thread(target=run_worker, args=(task | {"share": [i, n_process]}, keep), kwargs=few)
            for i in range(n_process)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=sorted(PARTS), help="what to run")
    parser.add_argument("--device", default="cuda", help="cuda, or with --quick also cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--time_limit", type=float, default=570, help="seconds after which cells are skipped")
    parser.add_argument("--output", help="append the JSON records to this file")
    args: argparse.Namespace = parser.parse_args()
    options = resolve_options(args.device, args.quick)
    require_appendable(args.output)
    put_off: list[UserError] = []
    run, lock, ends = f"{time.time():.0f}-{os.getpid()}", threading.Lock(), Counter[str]()

    if args.time_limit < 0:
        raise ConfigError(
            "there is no time to measure anything",
            where="--time_limit",
            seen=args.time_limit,
            required=">= 0 seconds",
            fix="leave it out",
        )

    def keep(record: dict) -> None:
        with lock:
            append_or_put_off(args.output, record | {"gpu_run": run, "quick": args.quick}, put_off)
            ends[record["status"]] += 1
            why = (record.get("error") or record.get("reason") or "").partition("\n")[0]
            print(f"{record['status']:>8}  {record['part']}  {record['cell']}  {why}".rstrip(), flush=True)

    started = time.time()
    run_parts(args.parts, options, args.time_limit, keep)
    counted = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    print(f"{counted or 'no cells'} in {time.time() - started:.0f} s")
    if put_off:
        raise put_off[0]
    if set(ends) - {DONE, SKIPPED}:
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
