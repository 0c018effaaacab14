"""Products on a CPU in which a row's bits depend neither on the other rows nor on their number.

Libraries choose a kernel by the number of rows, and kernels add up products in different orders. So when rows are of a
new number, random rows are multiplied together and in two parts. If bits differ, rows are multiplied in parts.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from models.experts import StackedExperts

# Numbers of rows up to this and its multiples are tested; other numbers run in two blocks. A test takes many products.
MOST_TESTED = 64
# From this number on, rows are a chunk of a prompt, and run whole: every decode of the prompt has the same chunks.
CHUNK = 256
# Results to compare, by bytes: of sums in another order most differ in float32, and one in 10,000 in bfloat16.
N_COMPARED = {4: 1 << 10, 2: 1 << 17}

Multiply = Callable[[Tensor], Tensor]  # x [n, d_in] -> [n, d_out]


@functools.cache
def _verdicts(kernel: Hashable) -> dict[int, bool]:
    """Return whether rows of a kernel have equal bits together and in parts, by their number, once it was tested."""
    return {}


def fewest_rows(model: Any) -> int:
    """Return the fewest rows in which a Transformer computes a row's bits: one where kernels and `multiply_rows` run
    all products, else two, since libraries add up a product with a single row in another order."""
    if model.backend.name != "cpp" or model.output is None:
        return 2
    return 2 if any(isinstance(part, nn.Linear | StackedExperts) for part in model.modules()) else 1


def multiply_rows(multiply: Multiply, x: Tensor, kernel: Hashable) -> Tensor:
    """Return `multiply(x)`, `x [n, d_in]`, in the largest blocks in which rows have the bits of smaller blocks.

    kernel: products with equal `kernel`, inputs, dtype and threads are tested once.
    """
    n_row = len(x)
    if not 0 < n_row < CHUNK:
        return multiply(x)
    if n_row > MOST_TESTED and (rest := n_row % MOST_TESTED):
        return torch.cat([multiply_rows(multiply, part, kernel) for part in x.split(n_row - rest)])
    verdicts = _verdicts((kernel, x.shape[1], x.dtype, torch.get_num_threads()))
    if n_row not in verdicts:
        verdicts[n_row] = _agree(multiply, x, kernel)
    return multiply(x) if verdicts[n_row] else _in_parts(multiply, x, kernel)


def _in_parts(multiply: Multiply, x: Tensor, kernel: Hashable) -> Tensor:
    """Multiply a single row next to a copy of itself, and more rows in halves."""
    if len(x) == 1:
        return multiply(torch.cat([x, x]))[:1]
    return torch.cat([multiply_rows(multiply, part, kernel) for part in x.split((len(x) + 1) // 2)])


def _agree(multiply: Multiply, like: Tensor, kernel: Hashable) -> bool:
    """Return whether random rows, as many as `like`, have equal bits together and in parts, where they are reversed."""
    generator, n_compared = torch.Generator().manual_seed(0), 0
    while True:
        x = torch.randn(like.shape, generator=generator).to(like.dtype)
        together = multiply(x)
        if not torch.equal(together, _in_parts(multiply, x.flip(0), kernel).flip(0)):
            return False
        n_compared += together.numel()
        if n_compared >= N_COMPARED[together.itemsize]:
            return True
