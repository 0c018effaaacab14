"""How a program ends: user errors become an exit code, and a reader of its output may leave early."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from common.errors import UserError

# The code of a program that SIGPIPE ended: 128 + 13.
UNREAD_CODE = 141


def exit_on_user_error(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run a program's `main`; a `UserError` becomes one message on stderr and exit code 2. flags: this program's names
    of fields."""
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        tell(f"error: {error.told(flags or {})}")
        sys.exit(2)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """End the program quietly, with UNREAD_CODE, when a reader of its output leaves. Characters that stdout's encoding
    lacks are escaped, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain: what is buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD_CODE)


def tell(message: str) -> None:
    """Print to stderr, if anybody still reads there."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
