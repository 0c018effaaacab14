"""Runs that are compared: interleaved, in the other order every other time, so that drift of the machine is in all."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Key, Value = TypeVar("Key"), TypeVar("Value")


def in_turns(runs: Mapping[Key, Callable[[], Value]], repeats: int) -> dict[Key, list[Value]]:
    """What each run gave, by repeat."""
    found: dict[Key, list[Value]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            found[name].append(runs[name]())
    return found
