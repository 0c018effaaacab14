"""Builds C++ kernels with the system's compiler, and uses the first build that is right and no slower than the next.

Builds, and what their checks found, are kept in the user's cache folder by machine, compiler and source.
"""

import ctypes
import fcntl
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from common.checkout import ROOT
from common.say import say

# The source of each kernel, and the module with what it is checked by.
KERNELS = {
    "attention": (ROOT / "models" / "attention" / "cpp_kernel.cpp", "models.attention.check"),
    "pointwise": (ROOT / "models" / "pointwise_kernel.cpp", "models.pointwise_check"),
    "linear": (ROOT / "models" / "linear_kernel.cpp", "models.linear_check"),
    "noise": (ROOT / "engine" / "noise_kernel.cpp", "engine.noise_check"),
}
COMPILE = ("-std=c++17", "-O3", "-fopenmp", "-fPIC")
# In the order of preference; PyTorch comes after the last.
BUILDS = {"native": ("-march=native",), "AVX2": ("-mavx2", "-mfma", "-mf16c"), "plain": ()}
TIMEOUT_SECONDS = 300
# A build is left for the next one if that is so many times as fast: noise must not decide.
FASTER = 1.1

Row = dict[str, Any]  # as `models.kernel_check` prints


class BuildError(Exception):
    """Why there is no kernel, in one line."""


class Choice(NamedTuple):
    """The build of a kernel that is used, or None, and why those before it are not. checked: the rows of each build."""

    build: str | None
    library: str
    refused: list[str]
    checked: dict[str, list[Row]]


def cache_folder() -> Path:
    """`$FORETOKEN_CACHE`, else `foretoken` in the user's cache folder."""
    given = os.environ.get("FORETOKEN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


def load_library(name: str) -> ctypes.CDLL:
    """Load a kernel of KERNELS, built and checked first where that has not been done. Errors: BuildError."""
    choice = choose(name)
    if choice.build is None:
        raise BuildError("; ".join(choice.refused))
    if choice.refused:
        say(f"note: the {choice.build} build of the {name} kernel is used: {'; '.join(choice.refused)}")
    try:
        return ctypes.CDLL(choice.library)
    except OSError as error:
        raise BuildError(f"it cannot be loaded: {str(error)[:200]}") from None


def choose(name: str, again: bool = False) -> Choice:
    """Choose among the builds of a kernel, as was done before unless `again`. Errors: BuildError if there are none."""
    try:
        cases = ROOT.joinpath(*KERNELS[name][1].split(".")).with_suffix(".py").read_text(encoding="utf-8")
        memory = _kept(name, [str(BUILDS), cases, version("torch")], "json")
        what = f"building and checking the {name} kernel for this CPU, once"
        return remembered(memory, what, lambda: _compared(name), again)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: a user without a home folder
        why = f"it cannot be built (FORETOKEN_CACHE names another folder): {str(error)[:200]}"
        raise BuildError(why) from None


def remembered(memory: Path, what: str, choose_anew: Callable[[], Choice], again: bool = False) -> Choice:
    """Return the choice that is kept in a file, or make it, say `what` is done, and keep it. Errors: OSError."""
    if not again and (known := _known(memory)):
        return known
    memory.parent.mkdir(parents=True, exist_ok=True)
    # Ranks that start together build once, and choose alike.
    with open(memory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not again and (known := _known(memory)):
            return known
        say(what)
        choice = choose_anew()
        with tempfile.TemporaryDirectory(dir=memory.parent) as own:
            written = Path(own, "choice.json")
            written.write_text(json.dumps(choice._asdict()), encoding="utf-8")
            os.replace(written, memory)
        return choice


def _known(memory: Path) -> Choice | None:
    """The choice that is kept in that file, if its library is still there."""
    with suppress(OSError, ValueError, TypeError):
        known = Choice(**json.loads(memory.read_text(encoding="utf-8")))
        if not known.library or Path(known.library).exists():
            return known
    return None


def _compared(name: str) -> Choice:
    """Take the first build that is right, then the next ones while they are faster. Errors: BuildError if none can be
    built."""
    build, best, refused = None, "", list[str]()
    reasons, checked = list[str](), dict[str, list[Row]]()
    for other in BUILDS:
        try:
            library = build_library(name, other)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or ["no message"]
            reasons.append(f"{other}: {shlex.join(_compiler())} cannot build it: {lines[0][:200]}")
            continue
        checked[other], wrong = check(KERNELS[name][1], str(library), *filter(None, [best]))
        if wrong:
            reasons.append(f"{other}: {wrong}")
            continue
        if build is not None:
            if (times := speedup(checked[other], 1)) < FASTER:
                break
            reasons.append(f"{build}: {other} is {times:.1f} times as fast")
        build, best, refused = other, str(library), [*reasons]
    if not checked:
        raise BuildError(reasons[0])
    if build is None:
        return Choice(None, "", reasons, checked)
    if (times := 1 / speedup(checked[build], -1)) > FASTER:
        return Choice(None, "", [*refused, f"{build}: PyTorch is {times:.1f} times as fast"], checked)
    return Choice(build, best, refused, checked)


def check(module: str, *candidates: str) -> tuple[list[Row], str | None]:
    """Compare the first candidate with the reference, on the cases of a module, and time it beside the others and
    PyTorch, in a process of its own. Returns what that printed, and why the candidate cannot be used."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": paths}, "stdin": subprocess.DEVNULL}
    own |= {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    try:
        ended = subprocess.run([sys.executable, "-m", "models.kernel_check", module, *candidates], **own)
    except subprocess.TimeoutExpired:
        return [], f"its check does not end in {TIMEOUT_SECONDS} s"
    if ended.returncode < 0:
        return [], f"it crashes ({signal.Signals(-ended.returncode).name})"
    if ended.returncode:
        return [], f"its check fails: {['', *ended.stderr.strip().splitlines()][-1][:200]}"
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        if not row["error"] <= row["allowed"]:
            return rows, f"wrong results ({row['what']}: an error of {row['error']:.1g}, allowed {row['allowed']:.1g})"
    return rows, None


def speedup(rows: Sequence[Row], other: int) -> float:
    """How many times as fast as another candidate the first is: the geometric mean over the rows."""
    return math.exp(sum(math.log(row["ms"][other] / row["ms"][0]) for row in rows) / len(rows))


def build_library(name: str, build: str) -> Path:
    """The library of a build, compiled unless it is there. Errors: CalledProcessError, OSError, TimeoutExpired."""
    library, compile_ = _kept(name, BUILDS[build], "so"), [*_compiler(), *COMPILE, *BUILDS[build]]
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Compiled elsewhere, then moved: other processes may read the file.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        # Linked without -fopenmp: a second OpenMP runtime beside PyTorch's would fight it for the cores.
        link = [word for word in compile_ if word != "-fopenmp"]
        for command in (
            [*compile_, "-c", str(KERNELS[name][0]), "-o", str(compiled)],
            [*link, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        os.replace(linked, library)
    return library


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not words[0]:
        raise BuildError("no C++ compiler (g++) was found; CXX names another one")
    return words


def _kept(name: str, about: Sequence[str], ending: str) -> Path:
    """A file in the cache folder, named by all that machine code depends on: processors may share a home folder."""
    digest = hashlib.sha256(KERNELS[name][0].read_bytes())
    digest.update(" ".join((*_compiler(), *COMPILE, *about, platform.machine())).encode())
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        digest.update("".join(line for line in text if line.startswith(("model name", "flags")))[:10_000].encode())
    return cache_folder().absolute() / f"{name}-{digest.hexdigest()[:16]}.{ending}"
