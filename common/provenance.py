"""The origin of a measurement: commit, machine and versions."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.checkout import ROOT


def provenance() -> dict[str, Any]:
    return {
        "git_commit": git_commit(),
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
    }


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """Return HEAD, with `-dirty` if tracked files differ from it or there are untracked Python files; None outside of
    git."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        is_new = git("ls-files", "--others", "--exclude-standard", "--", "*.py") and not commit.endswith("-dirty")
        return commit + ("-dirty" if is_new else "")
    except (OSError, subprocess.CalledProcessError):
        return None
