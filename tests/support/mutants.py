"""Put seeded bugs into copies of the source, one each: the test that is named next to a bug has to fail.

    make mutants        or: python tests/support/mutants.py [WORD]: only bugs whose description contains the word

Exit code 1 if a bug survives or the tests fail without one, 2 if a bug no longer fits the source. mutants.txt has
a heading per source file, and below it each bug with its test and its edit:

    # engine/sampling/distribution.py

    top-p stops one token early | test_sampling.py::test_one_row_has_the_law_of_the_reference
    - mass.cumsum(dim=-1) - mass <
    + mass.cumsum(dim=-1) <
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # for the tests of a bug
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "results", "*.pth", "*.gguf")
SCENARIOS = {"WITNESS_SCENARIOS": "200", "LLAMA_SCENARIOS": "20", "INTERRUPTIONS": "300"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"} | SCENARIOS


@dataclass(frozen=True)
class Mutant:
    """A bug: `old` occurs once in `file` and becomes `new`; then `test`, a pytest id below tests/, has to fail."""

    bug: str
    file: str
    old: str
    new: str
    test: str


def read(text: str) -> Iterator[Mutant]:
    file = ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            file, _, block = block[2:].partition("\n")
        if block:
            head, *edit = block.splitlines()
            bug, test = head.split(" | ")
            old, new = ("\n".join(line[2:] for line in edit if line.startswith(sign)) for sign in ("- ", "+ "))
            yield Mutant(bug, file, old, new, test)


def verdict(tests: Sequence[str], mutant: Mutant | None = None, jobs: int = 1) -> str:
    """Run tests in a copy of the source: "passed", "failed", or else the end of what pytest printed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = shutil.copytree(ROOT, Path(folder) / "checkout", ignore=NOT_COPIED)
        if mutant:
            path = root / mutant.file
            path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        flags = ["-x", "-q", "-p", "no:cacheprovider", f"-n{jobs if jobs > 1 else 0}"]
        command = ["timeout", f"{SECONDS * jobs}", sys.executable, "-m", "pytest", *flags]
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)], cwd=root, env=ENVIRONMENT, capture_output=True, text=True
        )
    if done.returncode == 0 and " passed" in done.stdout:  # and not all skipped
        return "passed"
    has_failed = re.search(r"^(FAILED|ERROR) \S+::", done.stdout, re.MULTILINE)  # ERROR: a fixture failed
    return "failed" if has_failed else f"exit code {done.returncode}: {done.stdout[-2000:]}"


def main(word: str = "") -> int:
    listed = read((ROOT / "tests/support/mutants.txt").read_text(encoding="utf-8"))
    mutants, jobs = [mutant for mutant in listed if word in mutant.bug], os.cpu_count() or 1
    for mutant in mutants:
        if (found := (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)) != 1:
            print(f"error: {mutant.file} has {found} places like {mutant.old!r}, of the bug: {mutant.bug}")
            return 2
    if (without := verdict(sorted({mutant.test for mutant in mutants}), jobs=jobs)) != "passed":
        print(f"the tests do not pass without any bug: {without}")
        return 1
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = list(pool.map(lambda mutant: verdict([mutant.test], mutant), mutants))
    for mutant, said in zip(mutants, verdicts, strict=True):
        print(f"{mutant.bug} | {mutant.file} | {mutant.test} | {said if said != 'passed' else 'SURVIVES'}")
    killed = verdicts.count("failed")
    print(json.dumps({"benchmark": "mutants", "killed": killed, "of": len(mutants)}))
    return int(killed != len(mutants))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
