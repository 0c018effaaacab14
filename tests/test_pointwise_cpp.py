"""Pointwise functions in C++ equal the eager ones, and a row's bits depend on the row alone."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from models import pointwise_cpp
from models.cpp_build import BuildError
from models.pointwise import EAGER, Pointwise
from models.pointwise_check import stored
from models.pointwise_cpp import cpp
from models.rope import Rope, Rotation, rotation

DTYPES = (torch.float32, torch.bfloat16)
ROWS, DIMS = (0, 1, 3, 8, 33), (576, 64, 100)
N_THREADS = 3
MANY = 700  # rows enough for every function to share them between threads
FUNCTIONS = ("add_norm", "rotate_heads", "swiglu")


@pytest.fixture(scope="module")
def kernel() -> Pointwise:
    try:
        return cpp()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_fallback(monkeypatch):
    """Make eager functions fail, so that every call has to reach the kernel."""
    broken = Pointwise(**{name: partial(pytest.fail, f"{name} ran eagerly") for name in (*FUNCTIONS, "store")})
    monkeypatch.setattr(pointwise_cpp, "EAGER", broken)


def inputs(name: str, n_row: int, dim: int, dtype: torch.dtype, strided: bool = True) -> tuple:
    """Return arguments for a function; `strided` ones are cut out of larger tensors, as heads are."""
    generator = torch.Generator().manual_seed(n_row + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def cut(*shape: int, scale: int = 1) -> Tensor:
        whole = scale * normal(shape[0], shape[1] + 3 * strided, *shape[2:])
        return whole[:, : shape[1]]

    if name == "add_norm":
        return cut(n_row, dim, scale=3), cut(n_row, dim), normal(dim), 1e-5
    if name == "rotate_heads":
        turns = rotation(torch.arange(n_row) * 37, Rope(torch.linspace(0.01, 1, dim // 2), torch.ones(dim // 2)), dtype)
        return cut(n_row, 5, dim), turns
    return (cut(n_row, 2 * dim if name == "swiglu" else dim, scale=8),)


def results(function, arguments: tuple) -> tuple[Tensor, ...]:
    got = function(*arguments)
    return got if isinstance(got, tuple) else (got,)


def pairs(kernel: Pointwise, name: str, arguments: tuple) -> list[tuple[Tensor, Tensor]]:
    """Each result of the kernel and of the eager function."""
    mine, eager = (results(getattr(functions, name), arguments) for functions in (kernel, EAGER))
    return list(zip(mine, eager, strict=True))


def rows_of(arguments: tuple, rows: slice) -> tuple:
    """The arguments for some rows; a weight or a number serves all of them."""

    def part(value):
        if isinstance(value, Rotation):
            return Rotation(*(each[rows] for each in value))
        return value[rows] if isinstance(value, Tensor) and value.dim() > 1 else value

    return tuple(map(part, arguments))


def assert_rounded_alike(name: str, index: int, got: Tensor, wanted: Tensor) -> None:
    """Sums are equal to the bit; products may be fused, and cost a step or two of the dtype."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and got.is_contiguous()
    if name == "add_norm" and index == 0:
        assert torch.equal(got, wanted)
    else:
        step = 2**-7 if got.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(got, wanted, rtol=2 * step, atol=1e-6)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_eager_function(kernel, no_fallback, name, dtype, strided):
    for n_row, dim in product(ROWS, DIMS):
        arguments = inputs(name, n_row, dim, dtype, strided)
        assert arguments[0].is_contiguous() != strided or n_row < 2
        for index, (got, wanted) in enumerate(pairs(kernel, name, arguments)):
            assert_rounded_alike(name, index, got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_depend_on_neither_the_other_rows_nor_the_threads(kernel, no_fallback, name, dtype):
    arguments = inputs(name, MANY, 100, dtype)
    function, before = getattr(kernel, name), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = results(function, arguments)
        torch.set_num_threads(N_THREADS)
        assert all(map(torch.equal, results(function, arguments), whole))
        for row in (0, 1, MANY // 2, MANY - 1):
            for n_row in (1, 3):
                rows = slice(max(0, row + 1 - n_row), row + 1)
                assert all(map(torch.equal, results(function, rows_of(arguments, rows)), (x[rows] for x in whole)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_are_not_finite_stay_in_their_row(kernel, no_fallback, name, value):
    arguments, others = inputs(name, 5, 100, torch.float32), [0, 1, 3, 4]
    clean = results(getattr(kernel, name), arguments)
    arguments[0][2, ..., 99] = value
    for (found, wanted), before in zip(pairs(kernel, name, arguments), clean, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isfinite(), wanted.isfinite())
        assert torch.equal(found[others], before[others])


@pytest.mark.parametrize("storage", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_entries_are_those_of_the_eager_function(kernel, dtype, storage, monkeypatch):
    """Every bit is equal, scales and untouched slots included; one vector is zero, one has ties between codes."""
    storage = storage or dtype
    for n_row, n_token, dim in ((1, 1, 64), (8, 4, 64), (3, 2, 100), (2, MANY, 128)):
        generator = torch.Generator().manual_seed(dim)
        new = (3 * torch.randn(n_row, n_token, 2, 3, dim, generator=generator)).to(dtype)
        new[0, 0, 0, 0], new[0, 0, 1, 0] = 0, torch.arange(dim) + 0.5
        new[0, 0, 1, 0, 0] = 127
        wanted = stored(new, storage, EAGER)
        with monkeypatch.context() as patch:
            patch.setattr(pointwise_cpp, "EAGER", Pointwise(store=partial(pytest.fail, "store ran eagerly")))
            assert all(map(torch.equal, stored(new, storage, kernel), wanted))
