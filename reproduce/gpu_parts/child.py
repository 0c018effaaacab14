"""Runs one step in a process of its own, and says what became of it."""

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
from reproduce.sweeping.child import die_with, last_words

DONE, FAILED, ERROR, SKIPPED, TIMED_OUT = "done", "failed", "error", "skipped", "timed out"
Record = dict[str, Any]


class Skip(Exception):
    """Why a step makes no sense on this machine."""


def verdict(is_good: bool, **figures: Any) -> Record:
    return {"status": DONE if is_good else FAILED, **figures}


class Running(NamedTuple):
    """A step that has begun. log: what it prints. began, deadline: seconds of `time.monotonic`."""

    step: Step
    process: BaseProcess
    log: Path
    began: float
    deadline: float

    def end(self) -> Record:
        """Kill what is left of the step, and return its record, also of one that crashed or is late."""
        now = time.monotonic()
        self.kill()
        said = f"ended with exit code {self.process.exitcode}: {last_words(self.log.read_text(errors='replace'))}"
        record: Record = {"status": TIMED_OUT} if now >= self.deadline else {"status": ERROR, "error": said}
        for _, found in read_lines(self.log.with_suffix(".json")):  # where it ran, and what it found
            record = record | found
        return record | {"seconds": round(now - self.began, 3)}

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def start(step: Step, device: str, quick: bool, log: Path, seconds: float) -> Running:
    """Start a step that may take so long: as a fork of this process, or on a GPU, which forks cannot share, anew."""
    context, given = get_context("fork" if device == "cpu" else "spawn"), step.given | (step.quick if quick else {})
    log.write_text("")
    log.with_suffix(".json").unlink(missing_ok=True)
    process = context.Process(target=work, args=(step.run, device, given, log, os.getpid()))
    process.start()
    return Running(step, process, log, time.monotonic(), time.monotonic() + seconds)


def work(run: str, device: str, given: Mapping[str, Any], log: Path, parent: int) -> None:
    """Call `run`, a function of a module of this package, and write its figures beside the log."""
    os.setsid()  # so that Ctrl-C reaches the parent alone, and whatever this starts ends with it
    die_with(parent)
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
