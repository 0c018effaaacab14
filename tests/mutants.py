"""Put seeded bugs into scratch copies of the source, one each: the test that is named beside a bug has to fail.

    make mutants        or: python tests/mutants.py [--only WORD] [--output results.jsonl]

Prints a table "bug -> killed by" and, last, one JSON object. Exit code 1 if a bug survives or if the tests
fail without one, 2 if a bug no longer fits the source.

The bugs are in tests/mutants.txt: a heading per source file, and below it each bug with its test and its edit.

    # engine/sampling.py

    top-p stops one token early | test_sampling.py::test_one_row_has_the_law_of_the_reference
    - mass.cumsum(dim=-1) - mass <
    + mass.cumsum(dim=-1) <
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from tyro.conf import arg

from common import cli
from common.checkout import ROOT
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say

SOURCES = ("common", "kv_cache", "models", "engine", "serving", "tests", "reproduce", "docs", "pyproject.toml")
SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """A bug: `old` occurs once in `file` and becomes `new`; then `test`, a pytest id below tests/, has to fail."""

    bug: str
    file: str
    old: str
    new: str
    test: str


def read(text: str) -> Iterator[Mutant]:
    """The bugs that a text in the format of tests/mutants.txt lists."""
    file = ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            file, _, block = block[2:].partition("\n")
        if block:
            head, *edit = block.splitlines()
            bug, test = head.split(" | ")
            old, new = ("\n".join(line[2:] for line in edit if line.startswith(sign)) for sign in ("- ", "+ "))
            yield Mutant(bug, file, old, new, test)


@dataclass(frozen=True)
class Flags:
    only: Annotated[str | None, arg(help_behavior_hint="(default: all)")] = None
    """only bugs whose description contains this"""
    jobs: int = os.cpu_count() or 1
    """bugs tried at a time"""
    output: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """append the JSON record to this file"""


class Result(NamedTuple):
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
    for name in ("convert_hf_checkpoint.py", "download.py", "foretoken.py"):
        shutil.copy(ROOT / name, to / name)
    return to


def require_fit(mutant: Mutant) -> None:
    """Raise ConfigError unless the text that the bug replaces occurs exactly once in its file."""
    found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    if found != 1:
        seen, fix = f"{found} places like {mutant.old!r}", "edit or remove the bug in tests/mutants.txt"
        raise ConfigError(f"this bug does not fit the source: {mutant.bug}", mutant.file, seen, "1 place", fix)


def apply(mutant: Mutant, root: Path) -> None:
    """Write the bug into its file below `root`."""
    path = root / mutant.file
    path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(tests: Sequence[str], root: Path, jobs: int) -> Result:
    """Run tests in `root` up to the first failure, in `jobs` processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WITNESS_SCENARIOS": "200", "LLAMA_SCENARIOS": "20"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-n", f"{jobs}", "--dist", "worksteal"] if jobs > 1 else []
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Result(None, f"no end within {SECONDS} s", SECONDS)
    failed = re.findall(r"^FAILED (?:tests/)?(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    is_broken = not failed and (done.returncode or " passed" not in done.stdout)  # or all were skipped
    said = (done.stdout + done.stderr)[-2000:] if is_broken else None
    return Result(failed[0] if failed else None, said, time.perf_counter() - started)


def try_mutant(mutant: Mutant | None, tests: Sequence[str], jobs: int = 1) -> Result:
    """Run tests on a copy with that bug. Without a bug they have to pass, or no kill would mean anything."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = copy_sources(Path(folder))
        if mutant is not None:
            apply(mutant, root)
        return run_tests([f"tests/{name}" for name in tests], root, jobs)


def main(flags: Flags) -> None:
    require_at_least("jobs", flags.jobs, 1)
    require_appendable(flags.output)
    listed = read((ROOT / "tests/mutants.txt").read_text(encoding="utf-8"))
    mutants = [mutant for mutant in listed if not flags.only or flags.only in mutant.bug]
    if not mutants:
        required, fix = "a word of a description in tests/mutants.txt", f"leave out {flag('only')}"
        raise ConfigError("no bug is described like that", flag("only"), flags.only, required, fix)
    for mutant in mutants:
        require_fit(mutant)
    without = try_mutant(None, sorted({mutant.test for mutant in mutants}), flags.jobs)
    if without.killed_by or without.broken:
        print(f"the tests fail without any bug: {without.killed_by or without.broken}")
        sys.exit(1)
    say(f"without a bug: all tests pass, {without.seconds:.0f} s")
    lines, bugs = ["| bug | in | killed by | s |", "|---|---|---|---|"], []
    with ThreadPoolExecutor(flags.jobs) as pool:
        results = pool.map(lambda mutant: try_mutant(mutant, [mutant.test]), mutants)
        for mutant, result in zip(mutants, results, strict=True):
            killed_by = result.killed_by or result.broken or "SURVIVES"
            say(f"{mutant.bug}: {killed_by}")
            lines.append(f"| {mutant.bug} | {mutant.file} | {killed_by} | {result.seconds:.0f} |")
            bugs.append({"bug": mutant.bug, "file": mutant.file, "killed_by": result.killed_by})
    survivors = sum(bug["killed_by"] is None for bug in bugs)
    record = {"benchmark": "mutants", "killed": len(bugs) - survivors, "of": len(bugs), "bugs": bugs, **provenance()}
    publish(flags.output, record, *lines, f"\n{record['killed']} of {record['of']} bugs killed\n")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
