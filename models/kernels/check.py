"""Compare a kernel with exact results on small cases: python -m models.kernels.check MODULE LIBRARY [RIVAL]

MODULE has `cases()`, and `candidate(library)`, which wraps the kernel for the cases. LIBRARY is a file, or the name of
a GPU kernel, whose cases are `gpu_cases()`. Ends with a message at the first case with an error that is not allowed.
With RIVAL, the library of another build, it compares times instead, and ends with a message if the rival is clearly
faster. `models.kernels.build` runs this in a separate process, because a wrong kernel may crash.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernels.build import BuildError, open_library

Results = tuple[Tensor, ...]
N_TIMED = 51  # runs of each library


class Case(NamedTuple):
    """Inputs on which a candidate is compared with the exact results."""

    what: str  # the kind of inputs
    allowed: float  # largest error, relative to the largest number of a row
    compute: Callable[[Any], Results]  # with a candidate
    expected: Results  # the first dimension of each is rows
    is_timed: bool = False  # whether builds are compared by the time that it takes

    def error(self, candidate: Any) -> float:
        """Return the largest relative error of any result; NaN if a result is NaN."""
        errors = []
        for found, exact in zip(self.compute(candidate), self.expected, strict=True):
            difference, largest = (found.double() - exact).flatten(1).abs(), exact.double().flatten(1).abs().amax(1)
            errors.append((difference.amax(1) / largest.where(largest > 0, 1.0)).max())
        return float(torch.stack(errors).max())


def speedup(cases: Sequence[Case], candidate: Any, rival: Any) -> float:
    """Return a candidate's time for cases, divided by a rival's: medians of runs in turns, on one thread."""
    torch.set_num_threads(1)
    times: tuple[list[float], ...] = [], []
    for _ in range(N_TIMED):
        for seconds, runner in zip(times, (candidate, rival), strict=True):
            start = perf_counter()
            for case in cases:
                case.compute(runner)
            seconds.append(perf_counter() - start)
    return median(times[0]) / median(times[1])


@torch.inference_mode()
def main(module: str, library: str, rival: str = "") -> None:
    suite, is_built = import_module(module), Path(library).exists()
    try:
        candidate, *others = (
            suite.candidate(open_library(Path(name)) if is_built else name) for name in (library, rival) if name
        )
    except BuildError as reason:
        sys.exit(str(reason))
    if others:
        print(speedup([case for case in suite.cases() if case.is_timed], candidate, *others))
        return
    for case in suite.cases() if is_built else suite.gpu_cases():
        if not (error := case.error(candidate)) <= case.allowed:
            sys.exit(f"wrong results ({case.what}: an error of {error:.1g}, allowed {case.allowed:.1g})")


if __name__ == "__main__":
    main(*sys.argv[1:])
