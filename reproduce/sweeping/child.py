"""One cell's process: started below a guardian, ended with its runner, and read when it is over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.checkout import ROOT

GUARDIAN = Path(__file__).parent / "guardian.py"
LAST_LINES, LAST_COLUMNS = 8, 500
QUIET_BARS = {"TQDM_MININTERVAL": "30"}


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `error` is None if all is well."""

    error: str | None
    seconds: float
    record: dict[str, Any] | None


def run_child(argv: Sequence[str], log: Path, timeout_s: float | None, kept_open: int) -> Outcome:
    """Run a script from the project's root to its end, or kill it and all that it started after `timeout_s`.

    log: gets its stderr as it comes, and its stdout at the end. kept_open: a file descriptor that stays open
    until the last of its processes is gone, also where this one is killed.
    """
    with log.open("wb") as stderr, tempfile.TemporaryFile(dir=log.parent) as stdout:
        began = time.monotonic()
        exit_code = _run([sys.executable, *argv], stdout, stderr, timeout_s, kept_open)
        seconds = time.monotonic() - began
        is_late = exit_code is None and timeout_s is not None and seconds >= timeout_s
        stdout.seek(0)
        printed = stdout.read()
        said = log.read_text(errors="replace")
        stderr.write(b"\n--- stdout ---\n" + printed)
    record = last_record(printed.decode(errors="replace"))
    if is_late:
        error: str | None = f"timed out after {timeout_s:g} s"
    elif exit_code is None:
        error = "the process that watched over it ended before it did"
    elif exit_code < 0:
        error = "\n".join(filter(None, [last_words(said), f"ended by signal {-exit_code}"]))
    elif exit_code > 0:
        error = "\n".join(filter(None, [last_words(said), f"exit code {exit_code}"]))
    else:
        error = None if record is not None else "exit code 0, but no line of its stdout is a JSON object"
    # Named from the output's folder: a row says nothing of the machine's other folders.
    return Outcome(error and f"{error}; see {log.parent.name}/{log.name}", round(seconds, 3), record)


def _run(
    command: Sequence[str], stdout: BinaryIO, stderr: BinaryIO, timeout_s: float | None, kept_open: int
) -> int | None:
    """The exit code, negative for a signal; None if the time was over, or the guardian was killed."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # In a session of its own: Ctrl-C reaches the runner alone, which closes the socket.
            guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARDIAN), str(theirs.fileno()), *command],
                cwd=ROOT,
                env=os.environ | QUIET_BARS,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(theirs.fileno(), kept_open),
                start_new_session=True,
            )
        try:
            ours.settimeout(timeout_s)
            told = ours.recv(16)
        except (TimeoutError, ConnectionResetError):
            told = b""
        finally:
            ours.close()
            guardian.wait()
    return int(told) if told else None


def last_record(printed: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
    for line in reversed(printed.splitlines()):
        if line.lstrip().startswith("{"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                return record
    return None


def last_words(said: str) -> str:
    """The project's error message in what a process said, or else its last lines; of a bar only how it ended."""
    lines = [line.rstrip().rpartition("\r")[2][:LAST_COLUMNS] for line in said.split("\n")]
    lines = [line for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error")]
    if not starts:
        return "\n".join(lines[-LAST_LINES:])
    first, *rest = lines[starts[-1] :]
    n_details = next((number for number, line in enumerate(rest) if not line.startswith("  ")), len(rest))
    return "\n".join([first, *rest[:n_details]])
