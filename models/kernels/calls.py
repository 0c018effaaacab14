"""Calls of C++ kernels, which can be recorded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_int, c_int64
from struct import pack, unpack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Call(NamedTuple):
    """A call of a kernel by a struct of sizes and of addresses of tensors, in words of 64 bits. kernel: None for
    PyTorch, which computed in its place."""

    name: str
    kernel: Any = None
    sizes: Sequence[int] = ()
    addresses: Sequence[int] = ()
    tensors: Sequence[Tensor | None] = ()  # kept, so that the addresses stay theirs


_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


def call(kernel: Any, sizes: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
    """Call a kernel with a struct of sizes and of addresses of tensors; record it while calls are recorded."""
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    words = (*sizes, *addresses)
    failed = kernel((c_int64 * len(words))(*words), c_int(torch.get_num_threads()))
    assert not failed, f"{kernel.__name__}: {sizes} were checked before"
    if (calls := _recorded.get()) is not None:
        calls.append(Call(kernel.__name__.removeprefix("foretoken_"), kernel, sizes, addresses, tensors))


def call_eager(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of PyTorch in the place of a kernel; record that while calls are recorded."""
    if (calls := _recorded.get()) is not None:
        calls.append(Call("eager"))
    return function(*arguments)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of a `with` block in a list."""
    calls = list[Call]()
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def float_word(number: float) -> int:
    """Return the word that holds a number in float64."""
    return unpack("q", pack("d", number))[0]
