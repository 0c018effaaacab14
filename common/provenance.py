"""Where a measurement comes from: commit, machine, versions."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from common.checkout import ROOT


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
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """HEAD, marked `-dirty` if tracked files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
