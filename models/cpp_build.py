"""Builds a C++ kernel with the system's compiler, once per machine and source."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

COMPILE = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """Why there is no kernel, in one line."""


def cache_folder() -> Path:
    """`$FORETOKEN_CACHE`, else `foretoken` in the user's cache folder."""
    given = os.environ.get("FORETOKEN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


def load_library(source: Path, name: str) -> ctypes.CDLL:
    """The library of one C++ file, `name` in the cache folder, built first where it has to be. Errors: BuildError."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not compiler[0]:
        raise BuildError("no C++ compiler (g++) was found; CXX names another one")
    try:
        library = cache_folder() / f"{name}-{_key(compiler, source)}.so"
        if not library.exists():
            _build(compiler, source, library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        raise BuildError(f"{shlex.join(compiler)} cannot build it: {lines[0][:200]}") from None
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: a user without a home folder
        why = f"it cannot be built or loaded (FORETOKEN_CACHE names another folder): {str(error)[:200]}"
        raise BuildError(why) from None


def _build(compiler: list[str], source: Path, library: Path) -> None:
    """Compile to a name of our own, then move: other processes may be building the same."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        # Linked without -fopenmp: a second OpenMP runtime beside PyTorch's would fight it for the cores.
        for command in (
            [*compiler, *COMPILE, "-c", str(source), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        os.replace(linked, library)


def _key(compiler: list[str], source: Path) -> str:
    """Of everything that the machine code depends on: a home folder may be shared by different processors."""
    digest = hashlib.sha256(source.read_bytes())
    digest.update(" ".join((*compiler, *COMPILE, platform.machine())).encode())
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        digest.update("".join(line for line in text if line.startswith(("model name", "flags")))[:10_000].encode())
    return digest.hexdigest()[:16]
