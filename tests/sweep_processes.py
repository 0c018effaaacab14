"""Runners of sweeps as processes that can be killed, and what is left of them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil

from common.exit import exit_on_user_error


def fork(act: Callable[[], object], said: Path | str = os.devnull) -> psutil.Process:
    """A process that does it, without the seconds that a new Python takes to import torch."""

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(said, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            exit_on_user_error(act)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return psutil.Process(process.pid)


def wait_until(is_so: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def processes_of(script: Path) -> list[psutil.Process]:
    """Those that have it on their command lines: cells and their guardians."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(script) in (process.info["cmdline"] or [])]
