"""Where a measurement comes from, and the file that it is appended to and read from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kv_cache.errors import ConfigError
from models.default_model import ROOT


def provenance() -> dict[str, Any]:
    """Commit, machine and versions of a measurement."""
    return {
        "git_commit": git_commit(),
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """HEAD, marked `-dirty` if tracked files differ from it; None outside a git checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def require_appendable(path: str | None, flag: str = "output") -> None:
    """Raise ConfigError unless a record can be appended to `path`: found out before a run, not after it."""
    if path is None:
        return
    parent = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(
            "a folder cannot be appended to",
            where=f"--{flag}",
            seen=path,
            required="a file",
            fix=f"name a file in it, such as {Path(path) / 'results.jsonl'}",
        )
    if not os.access(Path(path) if Path(path).exists() else parent, os.W_OK):
        raise ConfigError(
            "a file cannot be written",
            where=f"--{flag}",
            seen=path,
            required="a file in an existing, writable folder",
            fix=f"create {parent}, or choose another file",
        )


def append_record(path: str | None, record: dict[str, Any]) -> None:
    """Append one JSON line and force it to disk; a line that a killed run left unfinished is dropped first."""
    if path is None:
        return
    with open(path, "a+b") as file:
        _end_with_a_whole_line(file)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The file's JSON values, each with the number of its line; of a file that is not there, none.

    An empty line and a torn last one are none, a damaged one is its text.
    """
    lines = Path(path).read_bytes().split(b"\n") if Path(path).exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            value = line.decode(errors="replace")
        yield number, value


def _end_with_a_whole_line(file: BinaryIO) -> None:
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if not last:
        return
    try:
        json.loads(last)
        file.write(b"\n")
    except ValueError:
        file.truncate(file.tell() - len(last))
