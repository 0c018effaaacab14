"""Compare a kernel with PyTorch on small cases, and time both.

    python -m models.kernel_check MODULE CANDIDATE

MODULE has `cases()`, `candidate(library)`, which returns what a case computes with, and PyTorch's `REFERENCE`.
CANDIDATE is a library's file, or a name that the module knows. Prints a line of JSON for each kind of input: the
largest "error" relative to the largest number of a row, "allowed", "ms" and "pytorch_ms". `models.cpp_build` runs this
in a separate process, since a wrong kernel may crash it.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.cpp_build import BuildError

REPEATS = 15
Results = tuple[Tensor, ...]


class Case(NamedTuple):
    """Inputs on which a candidate is compared with the exact results."""

    what: str  # the kind of inputs
    allowed: float
    compute: Callable[[Any], Results]  # by a candidate
    expected: Results  # the first dimension of each is rows
    is_timed: bool = True

    def error(self, candidate: Any) -> float:
        """Return the largest relative error of any result; NaN if a result is NaN."""
        errors = []
        for found, exact in zip(self.compute(candidate), self.expected, strict=True):
            difference, largest = (found.double() - exact).flatten(1).abs(), exact.double().flatten(1).abs().amax(1)
            errors.append((difference.amax(1) / largest.where(largest > 0, 1.0)).max())
        return float(torch.stack(errors).max())


def milliseconds(cases: Sequence[Case], candidates: Sequence[Any]) -> list[float]:
    """Return each candidate's shortest time for all cases, on one thread.

    The candidates take turns, so that other work on the machine disturbs all of them.
    """
    best, n_thread = [float("inf")] * len(candidates), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(REPEATS):
        for i, candidate in enumerate(candidates):
            start = time.perf_counter()
            for case in cases:
                case.compute(candidate)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    torch.set_num_threads(n_thread)
    return best


def main(module: str, name: str) -> None:
    suite = import_module(module)
    candidate = suite.candidate(ctypes.CDLL(name) if Path(name).exists() else name)
    kinds: dict[str, list[Case]] = {}
    for case in suite.cases():
        kinds.setdefault(case.what, []).append(case)
    for what, cases in kinds.items():
        # NaN, which compares with nothing, counts as the largest.
        error = max((case.error(candidate) for case in cases), key=lambda error: (error != error, error))
        ms, pytorch_ms = milliseconds([case for case in cases if case.is_timed], [candidate, suite.REFERENCE])
        row = {"what": what, "error": error, "allowed": cases[0].allowed, "ms": ms, "pytorch_ms": pytorch_ms}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    try:
        with torch.inference_mode():
            main(*sys.argv[1:])
    except BuildError as error:  # from `candidate`
        sys.exit(str(error))
