"""The seeded bugs of `make mutants`: classic mistakes of speculative decoding, each as one edit of the source.

A text file per folder of the source; in it a heading per source file, and below it its bugs, with the tests to run:

    # engine/sampling.py

    top-p stops one token early | test_sampling.py
    - mass.cumsum(dim=-1) - mass <
    + mass.cumsum(dim=-1) <
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file` and becomes `new`; one of `tests` has to fail then."""

    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(text: str) -> Iterator[Mutant]:
    """The bugs of one text file."""
    file = ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            file = block[2:]
            continue
        head, *edit = block.splitlines()
        bug, tests = head.split(" | ")
        old, new = ("\n".join(line[2:] for line in edit if line.startswith(sign)) for sign in ("- ", "+ "))
        yield Mutant(bug, file, old, new, tuple(tests.split()))


MUTANTS = tuple(mutant for path in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read(path.read_text()))
