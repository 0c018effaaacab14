"""Compare a library of a kernel with the reference on small cases, and time it beside others.

    python -m models.kernel_check MODULE LIBRARY [OTHERS...]

MODULE has `cases()`, `candidate(library)`, which makes of a library what a case computes with, and the same of PyTorch,
`REFERENCE`. In place of a library's file there may be another name that the module knows.

Prints a line of JSON for each kind of input: the "error" relative to the largest value of a row, what is "allowed", and
"ms" of the library, of the others and of PyTorch. `models.cpp_build` runs it in a process of its own, which a kernel
that crashes takes along.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.cpp_build import BuildError

REPEATS = 15
Results = tuple[Tensor, ...]


class Case(NamedTuple):
    what: str  # what the inputs are like
    allowed: float
    compute: Callable[[Any], Results]  # by a candidate
    wanted: Results  # the first dimension of each is rows
    is_timed: bool = True

    def error(self, candidate: Any) -> float:
        """The largest error of any result; NaN if one is NaN."""
        errors = []
        for found, wanted in zip(self.compute(candidate), self.wanted, strict=True):
            difference, largest = (found.double() - wanted).flatten(1).abs(), wanted.double().flatten(1).abs().amax(1)
            errors.append((difference.amax(1) / largest.where(largest > 0, 1.0)).max())
        return float(torch.stack(errors).max())


def milliseconds(cases: Sequence[Case], candidates: Sequence[Any]) -> list[float]:
    """The shortest time of each candidate for all timed cases, on one thread. They take turns, so that a neighbour
    disturbs all of them."""
    best, n_thread = [float("inf")] * len(candidates), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(REPEATS):
        for i, candidate in enumerate(candidates):
            start = time.perf_counter()
            for case in cases:
                if case.is_timed:
                    case.compute(candidate)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    torch.set_num_threads(n_thread)
    return best


def rows_of(suite: Any, libraries: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """A row for each kind of input: the largest error of the first library, and times of all and of PyTorch."""
    candidates = [*map(suite.candidate, libraries), suite.REFERENCE]
    for what, together in groupby(sorted(suite.cases(), key=lambda case: case.what), key=lambda case: case.what):
        cases = list(together)
        error = max((case.error(candidates[0]) for case in cases), key=lambda x: (x != x, x))
        yield {"what": what, "error": error, "allowed": cases[0].allowed, "ms": milliseconds(cases, candidates)}


if __name__ == "__main__":
    try:
        with torch.inference_mode():
            libraries = [ctypes.CDLL(name) if Path(name).exists() else name for name in sys.argv[2:]]
            for row in rows_of(import_module(sys.argv[1]), libraries):
                print(json.dumps(row), flush=True)
    except BuildError as error:  # from `candidate`
        sys.exit(str(error))
