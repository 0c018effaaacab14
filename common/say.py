"""Print progress and notes of a run."""

import sys
from collections.abc import Iterable
from functools import cache

from common.process import is_leader


def say(message: str) -> None:
    """Print to stderr, on the leader only. Stdout is for results; its last line is the record."""
    if is_leader():
        print(message, file=sys.stderr, flush=True)


@cache
def say_once(message: str) -> None:
    """Print what every session of a process would say, the first time."""
    say(message)


def note_without_effect(fields: Iterable[str], why: str) -> None:
    """Print a note that the flags of these fields have no effect, and why."""
    say(f"note: {', '.join(f'--{field}' for field in fields)} without effect: {why}")


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
