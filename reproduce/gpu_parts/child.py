"""Run a step in a separate process, and report how it ended."""

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from common.checkout import ROOT
from common.errors import OutOfMemoryError
from common.jsonl import append_record, read_lines
from common.provenance import provenance
from reproduce.gpu_parts.steps import Step
from reproduce.helpers.records import Record

DONE, FAILED, ERROR, SKIPPED, TIMED_OUT = "done", "failed", "error", "skipped", "timed out"
LAST_LINES = 8


class Skip(Exception):
    """Raised by a step that makes no sense on this machine, with the reason."""


def verdict(is_good: bool, **figures: Any) -> Record:
    """Return the figures of a step with its status."""
    return {"status": DONE if is_good else FAILED, **figures}


class Running(NamedTuple):
    """A step that has begun. log: file of its messages. began, deadline: seconds of `time.monotonic`."""

    step: Step
    process: BaseProcess
    log: Path
    began: float
    deadline: float

    def end(self) -> Record:
        """Wait for the step until its deadline, kill its processes, and return its record."""
        self.process.join(max(0.0, self.deadline - time.monotonic()))
        is_late = self.process.exitcode is None
        self.kill()
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        record: Record = {"status": ERROR, "error": f"ended with exit code {self.process.exitcode}: {last}"}
        if is_late:
            record = {"status": TIMED_OUT}
        for _, found in read_lines(self.log.with_suffix(".json")):  # its provenance, and its figures
            record = record | found
        return record | {"seconds": round(time.monotonic() - self.began, 3)}

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def start(step: Step, device: str, quick: bool, log: Path, seconds: float) -> Running:
    """Start a step as a fork of this process, or on a GPU, which forks cannot share, as a new process."""
    context, given = get_context("fork" if device == "cpu" else "spawn"), step.given | (step.quick if quick else {})
    log.write_text("")
    log.with_suffix(".json").unlink(missing_ok=True)
    process = context.Process(target=work, args=(step.run, device, given, log))
    process.start()
    return Running(step, process, log, time.monotonic(), time.monotonic() + seconds)


def work(run: str, device: str, given: Mapping[str, Any], log: Path) -> None:
    """Call `run`, a function of a module of this package, and write its figures beside the log."""
    os.setsid()  # Ctrl-C reaches the parent alone, which then kills the whole session
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    os.chdir(ROOT)
    append_record(found := str(log.with_suffix(".json")), provenance())
    try:
        module, _, function = run.partition(".")
        figures = getattr(importlib.import_module(f"reproduce.gpu_parts.{module}"), function)(device, **given)
        append_record(found, {"status": DONE, "error": None} | figures)
    except (Skip, OutOfMemoryError) as reason:
        append_record(found, {"status": SKIPPED, "error": None, "reason": str(reason)})
    except Exception as error:
        traceback.print_exc()
        append_record(found, {"status": ERROR, "error": f"{type(error).__name__}: {str(error)[:2000]}"})
