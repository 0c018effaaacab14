"""Run the project's programs as a user starts them, in this process or in another."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from common.checkout import ROOT
from common.errors import UserError

COST_MODEL = "python -m cost_model"
BENCHMARKS = tuple(f"tests/{name}_benchmark.py" for name in ("baseline", "longspec", "selfspec"))
FORK, FORK_SECONDS = get_context("fork"), 600
TERMINAL = tuple(f"foretoken.py {name}" for name in ("compare", "latency", "eval", "chat", "serve"))


def overriding(usual: str, flags: str) -> list[str]:
    """Return the words of `usual`, without the flags that `flags` has, too, and those of `flags`."""
    given = {*re.findall(r"--\w+", flags)}
    kept = [part for part in re.split(r"\s+(?=--)", usual) if not given.intersection(re.findall(r"^--\w+", part))]
    return [*" ".join(kept).split(), *flags.split()]


@dataclass(frozen=True)
class Ended:
    """The end of a program: exit code, stdout, stderr, and the error that it reported if it ran in this process."""

    code: object
    out: str
    err: str
    error: UserError | None = None

    @property
    def lines(self) -> list[str]:
        """The lines that were printed before the record."""
        return self.out.splitlines()[:-1]

    @property
    def record(self) -> dict[str, Any]:
        """The record on the last printed line; requires success."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    @property
    def refusal(self) -> str:
        """The message of its error; requires that there is no other and no output."""
        assert (self.code, self.out) == (2, "") and "Traceback" not in self.err, self.err
        assert len(re.findall(r"^error: \S", self.err, re.MULTILINE)) == 1, self.err
        return self.err[self.err.index("error: ") :]


def saved(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def python(*words: object, **environment: str) -> Ended:
    """Run Python with those words in another process, without this one's PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
    return Ended(done.returncode, done.stdout, done.stderr)


def run(program: str, arguments: Sequence[str]) -> Ended:
    """Run a program in this process, as if there were no GPU. Words may follow its name, such as a subcommand."""
    out, err, code, error = io.StringIO(), io.StringIO(), 0, None
    path, *words = [program] if program == COST_MODEL else program.split()
    with (
        mock.patch.object(sys, "argv", [path, *words, *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch("torch.cuda.is_available", lambda: False),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            if program == COST_MODEL:
                runpy.run_module("cost_model", run_name="__main__")
            else:
                runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as ending:
            code = ending.code or 0
            error = ending.__context__ if isinstance(ending.__context__, UserError) else None
        except Exception as bug:  # its traceback would be printed
            code = 1
            err.write(f"{type(bug).__name__}: {bug}")
    return Ended(code, out.getvalue(), err.getvalue(), error)


_start = subprocess.run


def run_here(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Stand in for `subprocess.run`: run what `python -m MODULE` starts in this process."""
    python, flag, *words = command
    if (python, flag) != (sys.executable, "-m"):
        return _start(command, **how)
    ended = run(f"{words[0].replace('.', '/')}.py", words[1:])
    return subprocess.CompletedProcess(command, bool(ended.code), ended.out, ended.err or f"{ended.code}")


def in_fork(do: Callable[[], object], folder: Path = ROOT) -> Ended:
    """Call `do` in a child of this process, in a folder; return its end. A new process would import PyTorch anew.
    A child that takes too long is killed, and the test fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def child() -> None:
            os.chdir(folder)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = out, err
            do()

        process = FORK.Process(target=child)
        process.start()
        process.join(FORK_SECONDS)
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
        out.seek(0)
        err.seek(0)
        assert not is_late, f"it took longer than {FORK_SECONDS} s\n{out.read()}{err.read()}"
        return Ended(process.exitcode, out.read(), err.read())


def afresh(program: str, *words: object, folder: Path, **environment: str) -> Ended:
    """Run a text as `python -c` does, in a child of this process that has to import the project's modules anew."""

    def do() -> None:
        os.environ.update(environment)
        ours = {path.stem for path in ROOT.iterdir()}
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        sys.argv = ["-c", *map(str, words)]
        exec(program, {"__name__": "__main__"})

    return in_fork(do, folder)


def benchmark(name: str, arguments: Sequence[str]) -> Ended:
    """Run `selfspec`, `longspec` or `baseline` in this process."""
    return run(f"tests/{name}_benchmark.py", arguments)
