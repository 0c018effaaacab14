"""How a command line ends: with one message for the user's errors, quietly where nobody reads on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "from kv_cache.errors import ConfigError, exit_on_user_error\nexit_on_user_error(lambda: {})"


def run(body: str, *, lines: int | None = None) -> tuple[int, bytes, bytes]:
    """The exit code of a program with that `main`, and what it printed; reads only so many lines of its output."""
    command = [sys.executable, "-c", PROGRAM.format(body)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stderr is not None
        if lines is None:
            out, err = program.communicate()
        else:
            out = b"".join(program.stdout.readline() for _ in range(lines))
            program.stdout.close()
            err = program.stderr.read()
        return program.wait(), out, err


def test_a_user_error_is_one_message():
    error = "ConfigError('too small', where='--B', seen=0, required='1 or more', fix='use 1')"
    code, out, err = run(f"(_ for _ in ()).throw({error})")
    assert (code, out) == (2, b"")
    assert err == b"error: too small\n  where:    --B\n  seen:     0\n  required: 1 or more\n  fix:      use 1\n"


@pytest.mark.parametrize("n", [100_000, 20], ids=["more than a pipe holds", "less than a buffer holds"])
def test_whoever_stops_reading_is_not_told_off(n):
    code, out, err = run(f"[print(i) for i in range({n})] and __import__('time').sleep(0.5)", lines=1 if n > 20 else 0)
    assert (code, err) == (1, b"") and out == (b"0\n" if n > 20 else b"")
