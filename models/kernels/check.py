"""Compare a kernel with exact results on small cases: python -m models.kernels.check MODULE LIBRARY

MODULE has `cases()`, and `candidate(library)`, which wraps the kernel for the cases. LIBRARY is a file, or the name of
a GPU kernel, whose cases are `gpu_cases()`. Ends with a message at the first case with an error that is not allowed.
`models.kernels.build` runs this in a separate process, because a wrong kernel may crash.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernels.build import BuildError, open_library

Results = tuple[Tensor, ...]


class Case(NamedTuple):
    """Inputs on which a candidate is compared with the exact results."""

    what: str  # the kind of inputs
    allowed: float  # largest error, relative to the largest number of a row
    compute: Callable[[Any], Results]  # with a candidate
    expected: Results  # the first dimension of each is rows

    def error(self, candidate: Any) -> float:
        """Return the largest relative error of any result; NaN if a result is NaN."""
        errors = []
        for found, exact in zip(self.compute(candidate), self.expected, strict=True):
            difference, largest = (found.double() - exact).flatten(1).abs(), exact.double().flatten(1).abs().amax(1)
            errors.append((difference.amax(1) / largest.where(largest > 0, 1.0)).max())
        return float(torch.stack(errors).max())


@torch.inference_mode()
def main(module: str, library: str) -> None:
    suite, is_built = import_module(module), Path(library).exists()
    try:
        candidate = suite.candidate(open_library(Path(library)) if is_built else library)
    except BuildError as reason:
        sys.exit(str(reason))
    for case in suite.cases() if is_built else suite.gpu_cases():
        if not (error := case.error(candidate)) <= case.allowed:
            sys.exit(f"wrong results ({case.what}: an error of {error:.1g}, allowed {case.allowed:.1g})")


if __name__ == "__main__":
    main(*sys.argv[1:])
