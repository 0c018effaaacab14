"""The end of a program: errors of users and Ctrl-C become exit codes; readers may leave before its output ends."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from common.errors import UserError

# Exit codes that a shell reports of programs that SIGPIPE and SIGINT ended: 128 and the signal's number.
UNREAD_CODE, INTERRUPTED_CODE = 141, 130


def exit_on_user_error(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run a program's `main`; a `UserError` becomes a message on stderr and exit code 2, Ctrl-C exit code 130.

    flags: the program's flags for fields that it calls by another name.
    """
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        tell(f"error: {error.told(flags or {})}")
        sys.exit(2)
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(INTERRUPTED_CODE)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """End the program quietly, with UNREAD_CODE, if a reader of its output has left. Characters that stdout's encoding
    lacks are escaped."""
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
    """Print a message on stderr, if anybody still reads there."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
