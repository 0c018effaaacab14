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
    """A call of a kernel's function, whose argument is a struct of words of 64 bits: sizes, then addresses of tensors,
    the last of them of a result. Without words, a call of PyTorch."""

    function: Any
    words: Sequence[int]
    tensors: Sequence[Tensor | None]

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("foretoken_") if self.words else "eager"

    @property
    def n_size(self) -> int:
        return len(self.words) - len(self.tensors)


_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


def call(function: Any, sizes: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
    """Call a function that computes these sizes."""
    words = [*sizes, *(0 if x is None else x.data_ptr() for x in tensors)]
    failed = function((c_int64 * len(words))(*words), c_int(torch.get_num_threads()))
    assert not failed, f"{function.__name__}: {sizes} were checked before"
    if (calls := _recorded.get()) is not None:
        calls.append(Call(function, words, tensors))


def call_eager(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of PyTorch in the place of a kernel."""
    if (calls := _recorded.get()) is not None:
        calls.append(Call(function, (), ()))
    return function(*arguments)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of a `with` block in a list, which keeps their tensors."""
    calls = list[Call]()
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def float_word(number: float) -> int:
    """Return the word that holds a number in float64."""
    return unpack("q", pack("d", number))[0]
