"""Compare a kernel with PyTorch on small cases, and time both: python -m models.kernels.check MODULE LIBRARY

MODULE has `cases()`, `candidate(library)`, which wraps the kernel for the cases, and `REFERENCE`, its PyTorch form.
LIBRARY is a file, or a name that MODULE knows. Prints a line of JSON for each kind of inputs: the largest "error",
relative to the largest number of a row, "allowed", "ms" and "pytorch_ms". `models.kernels.build` runs this in
a separate process, because a wrong kernel may crash.
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

REPEATS = 15
Results = tuple[Tensor, ...]


class Case(NamedTuple):
    """Inputs on which a candidate is compared with the exact results."""

    what: str  # the kind of inputs
    allowed: float  # largest relative error
    compute: Callable[[Any], Results]  # with a candidate
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
    """Return each candidate's shortest time for all cases on one thread. Candidates take turns, so noise hits all."""
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


@torch.inference_mode()
def main(module: str, library: str) -> None:
    suite, kinds = import_module(module), dict[str, list[Case]]()
    candidate = suite.candidate(ctypes.CDLL(library) if Path(library).exists() else library)
    for case in suite.cases():
        kinds.setdefault(case.what, []).append(case)
    for what, cases in sorted(kinds.items()):
        # NaN counts as the largest error: max would depend on the order, as NaN compares false with every number.
        error = max((case.error(candidate) for case in cases), key=lambda error: (error != error, error))
        ms, pytorch_ms = milliseconds([case for case in cases if case.is_timed], [candidate, suite.REFERENCE])
        row = {"what": what, "error": error, "allowed": cases[0].allowed, "ms": ms, "pytorch_ms": pytorch_ms}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
