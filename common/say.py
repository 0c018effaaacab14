"""What a run says while it goes on."""

import sys

from common.process import is_leader


def say(message: str) -> None:
    """Progress and remarks go to stderr, from one rank: stdout is for results, its last line for the record."""
    if is_leader():
        print(message, file=sys.stderr, flush=True)


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
