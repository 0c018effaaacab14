"""Bits of a row of the pointwise functions in C++ depend on the row alone. Their check compares them with PyTorch."""

from functools import partial

import pytest
import torch
from torch import Tensor

from models.kernels import pointwise_cpp
from models.kernels.build import load_library
from models.kernels.pointwise import EAGER, Pointwise
from models.kernels.pointwise_check import arguments_of, call
from models.kernels.pointwise_cpp import BYTES, cpp
from models.rope import Rotation
from tests.support.machine import needs_cpp_compiler

pytestmark = needs_cpp_compiler
N_THREADS = 3
MANY = 700  # rows enough for every function to share them between threads
FUNCTIONS = ("add_norm", "rotate_heads", "rotate_heads, normalised", "swiglu", "pack")


@pytest.fixture(scope="module")
def kernel() -> Pointwise:
    return cpp(load_library("pointwise"))


@pytest.fixture
def no_fallback(monkeypatch):
    """Make eager functions fail, so that every call has to reach the kernel."""
    functions = "add_norm", "rotate_heads", "swiglu", "pack", "store"
    broken = Pointwise(**{name: partial(pytest.fail, f"{name} ran eagerly") for name in functions})
    monkeypatch.setattr(pointwise_cpp, "EAGER", broken)


def rows_of(arguments: tuple, rows: slice) -> tuple:
    """Return the arguments for some rows; a weight or a number serves all of them."""

    def part(value):
        if isinstance(value, Rotation):
            return Rotation(*(each[rows] for each in value))
        return value[rows] if isinstance(value, Tensor) and value.dim() > 1 else value

    return tuple(map(part, arguments))


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_depend_on_neither_the_other_rows_nor_the_threads(kernel, no_fallback, name, dtype):
    arguments = arguments_of(dtype, MANY, 100)[name]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = call(name, arguments, kernel)
        torch.set_num_threads(N_THREADS)
        assert all(map(torch.equal, call(name, arguments, kernel), whole))
        for row in (0, 1, MANY // 2, MANY - 1):
            for n_row in (1, 3):
                rows = slice(max(0, row + 1 - n_row), row + 1)
                found = call(name, rows_of(arguments, rows), kernel)
                assert all(map(torch.equal, found, (x[rows] for x in whole)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_are_not_finite_stay_in_their_row(kernel, no_fallback, name, value):
    arguments, others = arguments_of(torch.float32, 5, 100)[name], [0, 1, 3, 4]
    clean = call(name, arguments, kernel)
    arguments[0][2, ..., 7] = value
    each = (call(name, arguments, functions) for functions in (kernel, EAGER))
    for found, wanted, before in zip(*each, clean, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isfinite(), wanted.isfinite())
        assert torch.equal(found[others], before[others])
