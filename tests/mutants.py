"""Seeded bugs: each is put into a scratch copy of the source, and a test has to fail because of it.

    make mutants        or: python tests/mutants.py [--only WORD] [--output results.jsonl]

Prints a table "bug -> killed by" and, last, one JSON object. Exit code 1 if a bug survives, if the tests
fail without one, or if a bug no longer fits the source.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from mutant_table import MUTANTS, Mutant

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from engine.bench.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("common", "kv_cache", "models", "engine", "tests", "reproduce", "pyproject.toml")
SECONDS = 600


@dataclass(frozen=True)
class Result:
    """What a test run said: the first test that failed, None if all passed; `broken` if no test ran to an end."""

    killed_by: str | None
    broken: str | None
    seconds: float


def copy_sources(to: Path) -> Path:
    """A scratch checkout; tests find the repository around them, so nothing of the original is imported."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, to / name)
    for name in ("convert_hf_checkpoint.py", "download.py"):
        shutil.copy(ROOT / name, to / name)
    return to


def apply(mutant: Mutant, root: Path) -> None:
    """Write the bug into its file. Errors: ValueError if the line to change is not there exactly once."""
    path = root / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.bug}: {mutant.file} has {text.count(mutant.old)} places like {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(tests: tuple[str, ...], root: Path) -> Result:
    """Run test files in `root` up to the first failure."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WITNESS_SCENARIOS": "200", "LLAMA_SCENARIOS": "20"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Result(None, f"no end within {SECONDS} s", SECONDS)
    seconds = time.perf_counter() - started
    failed = re.findall(r"^FAILED (?:tests/)?(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed:
        return Result(failed[0], None, seconds)
    return Result(None, None if done.returncode == 0 else (done.stdout + done.stderr)[-2000:], seconds)


def try_mutant(mutant: Mutant) -> Result:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = copy_sources(Path(folder))
        apply(mutant, root)
        return run_tests(tuple(f"tests/{name}" for name in mutant.tests), root)


def try_without(mutants: Sequence[Mutant]) -> Result:
    """The same tests on the source as it is: they have to pass, or no kill would mean anything."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tests = sorted({f"tests/{name}" for mutant in mutants for name in mutant.tests})
        return run_tests(tuple(tests), copy_sources(Path(folder)))


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only bugs whose description has this word")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="bugs tried at a time")
    parser.add_argument("--output", help="append the JSON record to this file")
    args = parser.parse_args()
    require_appendable(args.output)
    mutants = [mutant for mutant in MUTANTS if not args.only or args.only in mutant.bug]
    if not mutants:
        raise ConfigError(
            "no bug is described like that",
            where="--only",
            seen=args.only,
            required="a word of a description in tests/mutant_table.py",
            fix="leave out --only",
        )
    without = try_without(mutants)
    if without.killed_by or without.broken:
        print(f"the tests fail without any bug: {without.killed_by or without.broken}")
        sys.exit(1)
    say(f"without a bug: all tests pass, {without.seconds:.0f} s")
    lines, bugs = ["| bug | in | killed by | s |", "|---|---|---|---|"], []
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, result in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            killed_by = result.killed_by or result.broken or "SURVIVES"
            say(f"{mutant.bug}: {killed_by}")
            lines.append(f"| {mutant.bug} | {mutant.file} | {killed_by} | {result.seconds:.0f} |")
            bugs.append({"bug": mutant.bug, "file": mutant.file, "killed_by": result.killed_by})
    survivors = sum(bug["killed_by"] is None for bug in bugs)
    record = {"benchmark": "mutants", "killed": len(bugs) - survivors, "of": len(bugs), "bugs": bugs, **provenance()}
    publish(args.output, record, *lines, f"\n{record['killed']} of {record['of']} bugs killed\n")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    exit_on_user_error(main)
