"""kill -9 of one rank in the middle of a run: how long until the job ends, what is said, and which rows are left.

    python reproduce/rank_death.py [--rank 1] [--output reproduce/results/rank_death.jsonl]

Self-speculation on the default model, two ranks of this machine; the rank is killed once the baseline's rows
are saved and speculation is under way. Prints what torchrun and the ranks said, and last one JSON object.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

import psutil

from common.errors import UserError
from common.exit import exit_on_user_error
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from engine.bench.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
N_ROWS, GEN_LEN = 2, 96
RUN = f"--B {N_ROWS} --prefix_len 1000 --gen_len {GEN_LEN} --gamma 3 --streamingllm_budget 128"
SECONDS_INTO_SPECULATION = 2.0
PATIENCE_SECONDS = 600


def pid_of_rank(job: psutil.Process, rank: int) -> int:
    """The process among torchrun's children that was started as `rank`."""
    return next(child.pid for child in job.children() if child.environ().get("RANK") == str(rank))


def wait_for_rows(job: subprocess.Popen, rows: Path, n_rows: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not rows.exists() or len(rows.read_text().splitlines()) < n_rows:
        if job.poll() is not None or time.monotonic() > deadline:
            raise UserError(
                "the run ended before it could be disturbed",
                where="torchrun",
                seen=f"exit code {job.poll()}",
                required=f"{n_rows} saved rows",
                fix="run tests/selfspec_benchmark.py by itself and see what it says",
            )
        time.sleep(0.1)


def kill_and_watch(rank: int, folder: Path) -> dict:
    """Run, kill, wait; returns what there is to record."""
    rows, said = folder / "rows.jsonl", folder / "stderr"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(ROOT / "tests" / "selfspec_benchmark.py"), *RUN.split(), "--save_rows", str(rows)]
    with said.open("w") as stderr:
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_for_rows(job, rows, N_ROWS)
        time.sleep(SECONDS_INTO_SPECULATION)
        os.kill(pid_of_rank(psutil.Process(job.pid), rank), signal.SIGKILL)
        killed = time.monotonic()
        exit_code = job.wait(PATIENCE_SECONDS)
        seconds = time.monotonic() - killed
    finally:
        job.terminate()
        job.wait()
    lines = [line for line in said.read_text().replace("\r", "\n").splitlines() if "tok/s" not in line]
    root_cause = lines[next((i for i, line in enumerate(lines) if "Root Cause" in line), len(lines)) :]
    say("\n".join(lines))
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    return {
        "killed_rank": rank,
        "seconds_to_exit": round(seconds, 2),
        "exit_code": exit_code,
        "root_cause": [line.strip() for line in root_cause if " : " in line],
        "ours": [line.strip() for line in lines if line.startswith("error")],
        "rows_kept": len(kept),
        "whole_rows": sum(len(row["tokens"]) == GEN_LEN for row in kept),
    }


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, choices=[0, 1], default=1, help="the rank to kill")
    parser.add_argument("--output", help="append the JSON record to this file")
    args = parser.parse_args()
    require_appendable(args.output)
    with tempfile.TemporaryDirectory() as folder:
        seen = kill_and_watch(args.rank, Path(folder))
    record = {"benchmark": "rank_death", "run": RUN, "ranks": 2, **seen, **provenance()}
    publish(args.output, record)


if __name__ == "__main__":
    exit_on_user_error(main)
