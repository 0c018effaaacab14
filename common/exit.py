"""How a program ends: what a user can cause becomes an exit code, and nobody has to read its output to the end."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from common.errors import UserError

# What a shell says of a program that SIGPIPE ended: 128 + 13.
UNREAD_CODE = 141


def exit_on_user_error(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run a program's `main`; a `UserError` becomes one message on stderr, with `flags` for names of fields that are
    not the program's, and exit code 2."""
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        tell(f"error: {error.told(flags or {})}")
        sys.exit(2)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """A program that cannot go on because a reader of its output left ends quietly, with UNREAD_CODE. What stdout's
    encoding does not have is escaped, as on stderr."""
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
    """Say it on stderr, if anybody still reads there."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
