"""Scripts, run in the process of the tests; what a command printed and how it ended."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The one JSON object on stdout, which is its last line; needs exit code 0."""
        assert self.code == 0, self.err
        records = [line for line in self.out.splitlines() if line.startswith("{")]
        assert records == self.out.splitlines()[-1:], self.out
        return json.loads(records[0])


class Script:
    """Runs a script in this process: `run(path, arguments)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, path: str | Path, arguments: list[str]) -> Ended:
        code = 0
        self.monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        self.monkeypatch.setattr(sys, "path", list(sys.path))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ending:
            code = int(ending.code or 0)
        return Ended(code, *self.capsys.readouterr())


class Benchmark(Script):
    """The same of a benchmark: `run("selfspec", arguments)`."""

    def __call__(self, path: str | Path, arguments: list[str]) -> Ended:
        return super().__call__(ROOT / "tests" / f"{path}_benchmark.py", arguments)
