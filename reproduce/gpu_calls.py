"""Run what a GPU has to show in a few minutes: commands with deadlines, and a record of each as it ends.

    python -m reproduce.gpu_calls --call a --output reproduction/gpu    # what is right, and kernels
    python -m reproduce.gpu_calls --call b --output reproduction/gpu    # rounds, the server
    python -m reproduce.gpu_calls --wheels wheels                       # first, where there is a network

gpu_calls.toml has the steps. A step that takes longer is ended, and the next begins. Exit code 1 if a step failed.
"""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from common import cli
from common.checkout import ROOT
from common.errors import refuse
from common.jsonl import append_record
from common.provenance import provenance
from common.say import say

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Bytes of a step's output that its record repeats.
TAIL = 2000


@dataclass(frozen=True)
class Flags:
    call: Literal["a", "b"] | None = None  # the steps to run
    output: Path = Path("reproduction/gpu")  # folder of the records and of each step's output
    wheels: Path | None = None  # download the packages that a machine with PyTorch lacks to this folder, and end


def run_steps(steps: Sequence[dict[str, Any]], output: Path) -> int:
    """Run steps, each of a `name`, `seconds` and a shell `command` in which `$OUT` is the folder `output`; write the
    output of each to `NAME.txt` there, and append a record to `steps.jsonl`. Returns how many failed."""
    output.mkdir(parents=True, exist_ok=True)
    environment, n_failed = os.environ | {"OUT": str(output.resolve())}, 0
    for step in steps:
        started, text = time.perf_counter(), output / f"{step['name']}.txt"
        say(f"{step['name']}: at most {step['seconds']} s")
        with text.open("wb") as file:
            how: dict[str, Any] = {"shell": True, "cwd": ROOT, "env": environment, "stdout": file, "stderr": file}
            process = subprocess.Popen(step["command"], start_new_session=True, **how)
            try:
                code = process.wait(step["seconds"])
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:  # also for Ctrl-C
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds, tail = round(time.perf_counter() - started, 1), text.read_bytes()[-TAIL:].decode(errors="replace")
        record = {"benchmark": "gpu_calls", **step, "code": code, "took": seconds, "tail": tail, **provenance()}
        append_record(str(output / "steps.jsonl"), record)
        say(f"{step['name']}: {'ended at its deadline' if code is None else f'exit code {code}'} after {seconds} s")
        n_failed += code != 0
    return n_failed


def main(flags: Flags) -> None:
    if flags.wheels is not None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(flags.wheels)]
        sys.exit(subprocess.run([*pip, *PLAN["pip"], *PLAN["packages"]]).returncode)
    if flags.call is None:
        refuse("call", "nothing", "a or b", fix="add --call a")
    if not torch.cuda.is_available():
        refuse("the machine", "no CUDA device", "a CUDA device that PyTorch sees", fix="run this on a machine with one")
    say(f"outputs and records: {flags.output}")
    if run_steps(PLAN[flags.call], flags.output):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
