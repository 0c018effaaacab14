"""One child process: in a session of its own, which ends with it; it dies with its runner. What it says is in files."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from common.checkout import ROOT

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
LAST_LINES, LAST_COLUMNS = 8, 500


class Outcome(NamedTuple):
    """What became of a child: `error` is None if all is well. exit_code: negative for a signal, None if it was late."""

    error: str | None
    seconds: float
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
    printed: Path | None = None,
    keep_open: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a script from the project's root to its end, or kill it after `timeout_s`; what its session has left running
    is killed, too. log: gets its stderr. printed: gets its stdout, which otherwise is this process's own. keep_open:
    file descriptors that stay open until it is gone, also where this process is killed."""
    began, exit_code = time.monotonic(), None
    with ExitStack() as files:
        # In a session of its own, so that Ctrl-C reaches the runner alone.
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=os.environ | {"TQDM_MININTERVAL": "30"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=files.enter_context(printed.open("wb")) if printed else None,
            stderr=files.enter_context(log.open("wb")),
            pass_fds=keep_open,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    error = None
    if exit_code is None:
        error = f"timed out after {timeout_s:g} s"
    elif exit_code:
        how = f"ended by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        error = f"{last_words(log.read_text(errors='replace'))}\n{how}".lstrip("\n")
    # Named from the output's folder: a row says nothing of the machine's other folders.
    told = error and f"{error}; see {log.parent.name}/{log.name}"
    return Outcome(told, round(time.monotonic() - began, 3), exit_code)


def last_object(printed: bytes) -> dict[str, Any] | None:
    for line in reversed(printed.split(b"\n")):
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


def last_words(said: str) -> str:
    """The project's error message in what a process said, or else its last lines; of a bar only how it ended."""
    lines = [line.rstrip().rpartition("\r")[2][:LAST_COLUMNS] for line in said.split("\n") if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error")]
    if not starts:
        return "\n".join(lines[-LAST_LINES:])
    first, *rest = lines[starts[-1] :]
    return "\n".join([first, *takewhile(lambda line: line.startswith("  "), rest)])
