"""One child process: in a session of its own, which ends with it; it dies with its runner. Read when it is over."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any

from common.checkout import ROOT

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
LAST_LINES, LAST_COLUMNS = 8, 500
# How long output may be on its way after the end. A process that a child left in another session may hold the pipe.
LAST_OUTPUT_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a child: `error` is None if all is well. exit_code: negative for a signal, None if it was late.
    record: the last line of its stdout that is a JSON object.
    """

    error: str | None
    seconds: float
    record: dict[str, Any] | None
    exit_code: int | None = 0


def die_with(parent: int) -> None:
    """In a new process, on Linux: be killed when `parent` ends, even if that was a moment ago."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run_child(
    argv: Sequence[str],
    log: Path,
    timeout_s: float | None = None,
    *,
    keep_open: Sequence[int] = (),
    hear: Callable[[dict[str, Any]], object] = lambda record: None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a script from the project's root to its end, or kill it after `timeout_s`; what its session has left running
    is killed, too.

    log: gets its stderr as it comes, and its stdout at the end. keep_open: file descriptors that stay open until it is
    gone, also where this process is killed. hear: is called with each line of stdout that is a JSON object, in a
    thread.
    """
    began, printed, records = time.monotonic(), list[bytes](), list[dict[str, Any]]()
    with log.open("wb") as stderr:
        # In a session of its own, so that Ctrl-C reaches the runner alone.
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=os.environ | {"TQDM_MININTERVAL": "30"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=keep_open,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )

        def read() -> None:
            for line in process.stdout or ():
                printed.append(line)
                if (record := read_object(line)) is not None:
                    records.append(record)
                    hear(record)

        reader, exit_code = Thread(target=read, daemon=True), None
        reader.start()
        try:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        reader.join(LAST_OUTPUT_SECONDS)
        words = last_words(log.read_text(errors="replace"))
        stderr.write(b"\n--- stdout ---\n" + b"".join(printed))
    error = None
    if exit_code is None:
        error = f"timed out after {timeout_s:g} s"
    elif exit_code:
        how = f"ended by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        error = f"{words}\n{how}" if words else how
    elif not records:
        error = "exit code 0, but no line of its stdout is a JSON object"
    # Named from the output's folder: a row says nothing of the machine's other folders.
    told = error and f"{error}; see {log.parent.name}/{log.name}"
    return Outcome(told, round(seconds, 3), records[-1] if records else None, exit_code)


def read_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, if it is one."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def last_words(said: str) -> str:
    """The project's error message in what a process said, or else its last lines; of a bar only how it ended."""
    lines = [line.rstrip().rpartition("\r")[2][:LAST_COLUMNS] for line in said.split("\n") if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error")]
    if not starts:
        return "\n".join(lines[-LAST_LINES:])
    first, *rest = lines[starts[-1] :]
    return "\n".join([first, *takewhile(lambda line: line.startswith("  "), rest)])
