"""kill -9 of one rank in the middle of a run: how long until the job ends, what is said, and which rows are left.

    python reproduce/rank_death.py [--rank 1] [--output reproduce/results/rank_death.jsonl]

Self-speculation on the default model, two ranks of this machine; the rank is killed once the baseline's rows
are saved and speculation is under way. Prints what torchrun and the ranks said, and last one JSON object.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from common import cli
from common.errors import UserError
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from engine.bench.config import Output
from reproduce.sweeping.child import ON_TWO_RANKS, run_child, said_in

N_ROWS, GEN_LEN = 2, 96
RUN = f"--B {N_ROWS} --prefix_len 1000 --gen_len {GEN_LEN} --gamma 3 --streamingllm_budget 128"
SECONDS_INTO_SPECULATION, PATIENCE_SECONDS = 2.0, 600


@dataclass(frozen=True)
class Flags(Output):
    rank: Literal[0, 1] = 1  # the rank to kill


def kill_rank(rank: int, rows: Path, killed_at: list[float]) -> None:
    """Kill that rank of this process's only child some seconds after the baseline's rows are saved; note when."""
    while not rows.exists() or len(rows.read_text().splitlines()) < N_ROWS:
        time.sleep(0.1)
    time.sleep(SECONDS_INTO_SPECULATION)
    found = (each for each in psutil.Process().children(recursive=True) if each.environ().get("RANK") == str(rank))
    next(found).kill()
    killed_at.append(time.monotonic())


def main(flags: Flags) -> None:
    """Run, kill, wait, record."""
    require_appendable(flags.output)
    killed_at = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        Thread(target=kill_rank, args=(flags.rank, rows, killed_at), daemon=True).start()
        command = [*ON_TWO_RANKS, "tests/selfspec_benchmark.py", *RUN.split(), "--save_rows", str(rows)]
        outcome, ended = run_child(command, log, PATIENCE_SECONDS), time.monotonic()
        lines = [line for line in said_in(log).replace("\r", "\n").splitlines() if "tok/s" not in line]
        kept = rows.read_text().splitlines() if rows.exists() else []
    say("\n".join(lines))
    if not killed_at or outcome.exit_code is None:
        what, seen = "the run ended before it could be disturbed", outcome.error or "exit code 0"
        fix = "run tests/selfspec_benchmark.py by itself and see what it says"
        raise UserError(what, "torchrun", seen, f"{N_ROWS} saved rows", fix)
    root_cause = lines[next((i for i, line in enumerate(lines) if "Root Cause" in line), len(lines)) :]
    record = {"benchmark": "rank_death", "run": RUN, "ranks": 2, "killed_rank": flags.rank}
    record |= {"seconds_to_exit": round(ended - killed_at[0], 2), "exit_code": outcome.exit_code}
    record |= {"root_cause": [line.strip() for line in root_cause if " : " in line]}
    record |= {"ours": [line.strip() for line in lines if line.startswith("error")], "rows_kept": len(kept)}
    record |= {"whole_rows": sum(len(json.loads(row)["tokens"]) == GEN_LEN for row in kept)}
    publish(flags.output, record | provenance())


if __name__ == "__main__":
    cli.run_alone(main, Flags)
