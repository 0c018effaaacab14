"""Bits of a row of the pointwise functions in C++ depend on the row alone. Their check compares them with PyTorch."""

from functools import partial

import pytest
import torch
from torch import Tensor

from models.kernels import pointwise_cpp
from models.kernels.build import load_library
from models.kernels.pointwise import EAGER, Pointwise
from models.kernels.pointwise_cpp import cpp
from models.rope import Rope, Rotation, rotation
from tests.support.machine import needs_cpp_compiler

pytestmark = needs_cpp_compiler
DTYPES = (torch.float32, torch.bfloat16)
N_THREADS = 3
MANY = 700  # rows enough for every function to share them between threads
FUNCTIONS = ("add_norm", "rotate_heads", "swiglu", "pack")


@pytest.fixture(scope="module")
def kernel() -> Pointwise:
    return cpp(load_library("pointwise"))


@pytest.fixture
def no_fallback(monkeypatch):
    """Make eager functions fail, so that every call has to reach the kernel."""
    broken = Pointwise(**{name: partial(pytest.fail, f"{name} ran eagerly") for name in (*FUNCTIONS, "store")})
    monkeypatch.setattr(pointwise_cpp, "EAGER", broken)


def inputs(name: str, n_row: int, dim: int, dtype: torch.dtype) -> tuple:
    """Return arguments for a function, cut out of wider tensors, as heads are."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(n_row + dim), dtype=torch.float64)

    def cut(*shape: int, scale: int = 1) -> Tensor:
        return (scale * normal(n_row, shape[0] + 3, *shape[1:])).to(dtype)[:, : shape[0]]

    if name == "add_norm":
        return cut(dim, scale=3), cut(dim), normal(dim).to(dtype), 1e-5
    if name == "rotate_heads":
        rope = Rope(torch.linspace(0.01, 1, dim // 2), torch.ones(dim // 2))
        return cut(5, dim), rotation(torch.arange(n_row) * 37, rope, dtype)
    if name == "pack":
        heads = cut(5, dim)
        return heads[:, :2], heads[:, 3:]
    return (cut(2 * dim, scale=8),)


def results(functions: Pointwise, name: str, arguments: tuple) -> tuple[Tensor, ...]:
    got = getattr(functions, name)(*arguments)
    return got if isinstance(got, tuple) else (got,)


def rows_of(arguments: tuple, rows: slice) -> tuple:
    """Return the arguments for some rows; a weight or a number serves all of them."""

    def part(value):
        if isinstance(value, Rotation):
            return Rotation(*(each[rows] for each in value))
        return value[rows] if isinstance(value, Tensor) and value.dim() > 1 else value

    return tuple(map(part, arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_depend_on_neither_the_other_rows_nor_the_threads(kernel, no_fallback, name, dtype):
    arguments = inputs(name, MANY, 100, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = results(kernel, name, arguments)
        torch.set_num_threads(N_THREADS)
        assert all(map(torch.equal, results(kernel, name, arguments), whole))
        for row in (0, 1, MANY // 2, MANY - 1):
            for n_row in (1, 3):
                rows = slice(max(0, row + 1 - n_row), row + 1)
                found = results(kernel, name, rows_of(arguments, rows))
                assert all(map(torch.equal, found, (x[rows] for x in whole)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_are_not_finite_stay_in_their_row(kernel, no_fallback, name, value):
    arguments, others = inputs(name, 5, 100, torch.float32), [0, 1, 3, 4]
    clean = results(kernel, name, arguments)
    arguments[0][2, ..., 99] = value
    each = (results(functions, name, arguments) for functions in (kernel, EAGER))
    for found, wanted, before in zip(*each, clean, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isfinite(), wanted.isfinite())
        assert torch.equal(found[others], before[others])
