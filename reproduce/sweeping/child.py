"""One child process: started below a guardian, ended with its runner, and read when it is over."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any

from common.checkout import ROOT

GUARDIAN = Path(__file__).parent / "guardian.py"
LAST_LINES, LAST_COLUMNS = 8, 500
STDOUT_FOLLOWS = "\n--- stdout ---\n"
# How long output may be on its way after the end. A process that a child without its guardian left may hold the pipe.
LAST_OUTPUT_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a child: `error` is None if all is well. exit_code: negative for a signal, None if it was late
    or lost its guardian. record: the last line of its stdout that is a JSON object.
    """

    error: str | None
    seconds: float
    record: dict[str, Any] | None
    exit_code: int | None = 0


def run_child(
    argv: Sequence[str],
    log: Path,
    timeout_s: float | None = None,
    *,
    keep_open: Sequence[int] = (),
    hear: Callable[[dict[str, Any]], object] = lambda record: None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a script from the project's root to its end, or kill it and all that it started after `timeout_s`.

    log: gets its stderr as it comes, and its stdout at the end. keep_open: file descriptors that stay open until the
    last of its processes is gone, also where this one is killed. hear: is called with each line of stdout that is a
    JSON object, in a thread.
    """
    began, printed, records = time.monotonic(), list[bytes](), list[dict[str, Any]]()
    ours, theirs = socket.socketpair()
    with ours, log.open("wb") as stderr:
        with theirs:
            # In a session of its own: Ctrl-C reaches the runner alone, which closes the socket.
            guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARDIAN), str(theirs.fileno()), sys.executable, *argv],
                cwd=ROOT,
                env=os.environ | {"TQDM_MININTERVAL": "30"} | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=(theirs.fileno(), *keep_open),
                start_new_session=True,
            )

        def read() -> None:
            assert guardian.stdout is not None
            with guardian.stdout:
                for line in guardian.stdout:
                    printed.append(line)
                    if (record := read_object(line)) is not None:
                        records.append(record)
                        hear(record)

        reader = Thread(target=read, daemon=True)
        reader.start()
        try:
            ours.settimeout(timeout_s)
            answer = ours.recv(16)
        except (TimeoutError, ConnectionResetError):
            answer = b""
        finally:
            ours.close()
            guardian.wait()
        seconds = time.monotonic() - began
        reader.join(LAST_OUTPUT_SECONDS)
        words = last_words(said_in(log))
        stderr.write(STDOUT_FOLLOWS.encode() + b"".join(printed))
    exit_code = int(answer) if answer else None
    error = ""
    if exit_code is None and timeout_s is not None and seconds >= timeout_s:
        error = f"timed out after {timeout_s:g} s"
    elif exit_code is None:
        error = "the process that watched over it ended before it did"
    elif exit_code:
        how = f"ended by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        error = f"{words}\n{how}" if words else how
    elif not records:
        error = "exit code 0, but no line of its stdout is a JSON object"
    # Named from the output's folder: a row says nothing of the machine's other folders.
    told = f"{error}; see {log.parent.name}/{log.name}" if error else None
    return Outcome(told, round(seconds, 3), records[-1] if records else None, exit_code)


def said_in(log: Path) -> str:
    """The stderr of a child, from its log."""
    return log.read_text(errors="replace").partition(STDOUT_FOLLOWS)[0]


def read_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, if it is one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def last_words(said: str) -> str:
    """The project's error message in what a process said, or else its last lines; of a bar only how it ended."""
    lines = [line.rstrip().rpartition("\r")[2][:LAST_COLUMNS] for line in said.split("\n")]
    lines = [line for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error")]
    if not starts:
        return "\n".join(lines[-LAST_LINES:])
    first, *rest = lines[starts[-1] :]
    return "\n".join([first, *takewhile(lambda line: line.startswith("  "), rest)])
