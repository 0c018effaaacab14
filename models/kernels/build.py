"""Build the C++ kernels, check each build in a separate process, and load the first that is right.

Attention kernels for GPUs, which Triton or another package builds, are checked in the same way. Libraries and the
results of checks are kept in the user's cache folder by machine, compiler, versions and source.
"""

import ctypes
import fcntl
import functools
import hashlib
import json
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
from typing import NamedTuple, TypeVar

import torch

from common.checkout import ROOT
from common.jsonl import parse_json
from common.provenance import package_version
from common.say import say


class Kernel(NamedTuple):
    """A kernel that is checked before it is used. cases: the module whose cases it has to compute. source: a file of
    C++; None for kernels of a GPU. has_optional_builds: true if its source has the builds of CPU_FLAGS, too."""

    cases: str
    source: Path | None = None
    has_optional_builds: bool = False


KERNELS = {
    "attention": Kernel("models.attention.check", ROOT / "models" / "attention" / "cpp_kernel.cpp", True),
    "pointwise": Kernel("models.kernels.pointwise_check", ROOT / "models" / "kernels" / "pointwise_kernel.cpp"),
    "linear": Kernel("models.kernels.linear_check", ROOT / "models" / "kernels" / "linear_kernel.cpp", True),
    "noise": Kernel("engine.sampling.noise_check", ROOT / "engine" / "sampling" / "noise_kernel.cpp"),
    "filter": Kernel("engine.sampling.filter_check", ROOT / "engine" / "sampling" / "filter_kernel.cpp"),
    "triton": Kernel("models.attention.check"),
    "flash": Kernel("models.attention.check"),
}
# Packages with kernels for GPUs: after a change of version, kernels are checked anew.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "fa3-fwd")
COMPILE = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-I.")  # in ROOT
# Flags of each build, in the order of preference; PyTorch comes after the last.
BUILDS = {
    "AMX": ("-march=native", "-DAMX"),
    "native": ("-march=native",),
    "widened": ("-march=native", "-DWIDENED"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
# The flags of CPUs that optional builds are for: some CPUs multiply pairs of bfloat16 so slowly that widening them to
# float32 is faster.
CPU_FLAGS = {"AMX": "amx_tile", "widened": "avx512_bf16"}
CLEARLY = 1.1  # times as fast: noise must not choose between builds that are equally fast
TIMEOUT_SECONDS = 300

Bound = TypeVar("Bound")


class BuildError(Exception):
    """The reason why there is no kernel, in one line."""


class BuildChoice(NamedTuple):
    """The build of a kernel that is used, and why."""

    build: str | None  # None: PyTorch is used
    refused: list[str]  # reasons against other builds


def cache_folder() -> Path:
    """Return `$FORETOKEN_CACHE`, else `foretoken` in the user's cache folder."""
    given = os.environ.get("FORETOKEN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


def use_kernel(name: str, bind: Callable[[ctypes.CDLL], Bound], instead: str) -> Bound | None:
    """Return what `bind` makes of a kernel's library; None, with a note of what happens instead, without it."""
    try:
        return bind(load_library(name))
    except BuildError as error:
        say(f"note: {instead}: {error}")
        return None


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
    """Load a kernel of KERNELS, built and checked at its first use. Raises BuildError."""
    choice = choose(name)
    if choice.build is None:
        raise BuildError("; ".join(choice.refused))
    if choice.refused:
        say(f"note: the {choice.build} build of the {name} kernel is used: {'; '.join(choice.refused)}")
    try:
        return open_library(build_library(name, choice.build))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"it cannot be loaded: {str(error)[:200]}") from None


def open_library(library: Path) -> ctypes.CDLL:
    """Load a library. Raises OSError, or BuildError if it says that this process cannot use it."""
    loaded = ctypes.CDLL(str(library))
    if hasattr(loaded, "foretoken_refusal"):
        loaded.foretoken_refusal.restype = ctypes.c_char_p
        if reason := loaded.foretoken_refusal():
            raise BuildError(reason.decode())
    return loaded


def choose(name: str, again: bool = False) -> BuildChoice:
    """Return the stored choice of a kernel's build, or check builds, anew if `again`. Raises BuildError."""
    kernel = KERNELS[name]
    try:
        cases = ROOT.joinpath(*kernel.cases.split(".")).with_suffix(".py")
        if kernel.source:
            about = [cases.read_text(encoding="utf-8"), str(BUILDS), version("torch"), *_of_machine_code(kernel.source)]
        else:  # the kernels are written in Python, next to their cases
            texts = (path.read_text(encoding="utf-8") for path in sorted(cases.parent.glob("*.py")))
            about = [torch.cuda.get_device_name(), *map(str, map(package_version, PACKAGES)), *texts]
        title = f"checking the {name} kernel on this {'CPU' if kernel.source else 'GPU'}, once"
        return remembered(_cache_file(name, "json", about), title, lambda: _first_good_build(name), again)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: a user without a home folder
        why = f"it cannot be built or checked (FORETOKEN_CACHE names another folder): {str(error)[:200]}"
        raise BuildError(why) from None


def remembered(memory: Path, title: str, compare: Callable[[], BuildChoice], again: bool = False) -> BuildChoice:
    """Return the choice in the file `memory`; without it, or if `again`, compare and write it. Raises OSError."""
    choice = None if again else _stored(memory)
    if choice is None:
        memory.parent.mkdir(parents=True, exist_ok=True)
        # Ranks that start together compare once, and use the same build.
        # For reading, too: opening a FIFO only to write would wait for a reader.
        with open(os.open(memory.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666), "rb", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            choice = None if again else _stored(memory)
            if choice is None:
                say(title)
                choice, partial = compare(), memory.with_suffix(".partial")
                partial.unlink(missing_ok=True)
                partial.write_text(json.dumps(choice._asdict()), encoding="utf-8")
                os.replace(partial, memory)
    return choice


def _stored(memory: Path) -> BuildChoice | None:
    """Return the choice in a file; None if the file is missing, damaged or no file. Raises OSError."""
    if not memory.is_file():
        return None
    try:
        return BuildChoice(**parse_json(memory.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None


def _first_good_build(name: str) -> BuildChoice:
    """Return the first build that is right. Raises BuildError if none can be compiled, and for a kernel of a GPU that
    is not right, so that it is checked again at the next start."""
    kernel, refused, n_built = KERNELS[name], list[str](), 0
    for build in builds_of(kernel) if kernel.source else (name,):
        try:
            candidate = str(build_library(name, build)) if kernel.source else name
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or ["no message"]
            refused.append(f"{build}: {shlex.join(_compiler())} cannot build it: {lines[0][:200]}")
            continue
        problem, n_built = check(kernel.cases, candidate) or overtaken(name, build), n_built + 1
        if not problem:
            return BuildChoice(build, refused)
        refused.append(f"{build}: {problem}")
    if not (kernel.source and n_built):
        raise BuildError(refused[0])
    return BuildChoice(None, refused)


def builds_of(kernel: Kernel) -> list[str]:
    """Return the builds to try for a kernel of C++."""
    flags = _cpu().split()
    optional = [build for build in CPU_FLAGS if kernel.has_optional_builds and CPU_FLAGS[build] in flags]
    return [build for build in BUILDS if build in optional or build not in CPU_FLAGS]


def overtaken(name: str, build: str) -> str | None:
    """Return how much faster than the native build the widened build is, if it is right and clearly faster."""
    kernel = KERNELS[name]
    if build != "native" or "widened" not in builds_of(kernel):
        return None
    try:
        library, rival = (str(build_library(name, of)) for of in (build, "widened"))
    except subprocess.CalledProcessError:
        return None
    problem, printed = _run_cases(kernel.cases, library, rival)
    ratio = 1.0 if problem else float(printed)
    if ratio <= CLEARLY or check(kernel.cases, rival):
        return None
    return f"the widened build is {ratio:.1f} times as fast"


def check(module: str, candidate: str) -> str | None:
    """Return why a candidate cannot be used in the cases of a module; None if its results are right."""
    return _run_cases(module, candidate)[0]


def _run_cases(module: str, *candidates: str) -> tuple[str | None, str]:
    """Check a candidate, or time it and a rival, in a process that may crash. Returns why that failed, or None, and its
    output."""
    command = [sys.executable, "-m", "models.kernels.check", module, *candidates]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its check does not end in {TIMEOUT_SECONDS} s", ""
    if ended.returncode < 0:
        return f"it crashes ({signal.Signals(-ended.returncode).name})", ""
    message = ["no message", *ended.stderr.strip().splitlines()][-1][:200]
    return message if ended.returncode else None, ended.stdout


def build_library(name: str, build: str) -> Path:
    """Compile a build unless its library is there, and return the library. Raises SubprocessError or OSError."""
    source = KERNELS[name].source
    assert source is not None
    library = _cache_file(name, "so", [*BUILDS[build], *_of_machine_code(source)])
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Compiled in another folder, then moved: other processes may read the file.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = f"{folder}/kernel.o", f"{folder}/kernel.so"
        # Linked without -fopenmp: a second OpenMP runtime would compete with PyTorch's for the cores.
        compile_ = [*COMPILE, *BUILDS[build], "-c", str(source), "-o", compiled]
        for words in (compile_, ["-shared", compiled, "-o", linked]):
            command = [*_compiler(), *words]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        os.replace(linked, library)
    return library


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not words[0]:
        raise BuildError("no C++ compiler (g++) was found; CXX names another one")
    return words


def _of_machine_code(source: Path) -> list[str]:
    """Return all that a library depends on, apart from its flags: several processors may share a home folder."""
    texts = (path.read_text(encoding="utf-8") for path in (source, *sorted(ROOT.glob("*/*/*.hpp"))))
    return [*texts, *_compiler(), *COMPILE, platform.machine(), _cpu()]


def _cpu() -> str:
    """Return the name and the flags of each core, as far as they fit 10,000 characters."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return "".join(line for line in text if line.startswith(("model name", "flags")))[:10_000]
    return ""


def _cache_file(name: str, ending: str, about: Sequence[str]) -> Path:
    """Return a path in `cache_folder` that these texts name."""
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()
    return cache_folder().absolute() / f"{name}-{digest[:16]}.{ending}"
