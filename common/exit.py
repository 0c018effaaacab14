"""The end of a program: turn users' errors, Ctrl-C and closed pipes into exit codes."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NoReturn

from common.errors import UserError

# The exit codes of SIGPIPE and SIGINT in a shell: 128 plus the signal's number.
UNREAD_CODE, INTERRUPTED_CODE = 141, 130


def exit_on_user_error(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run a program's `main`; a `UserError` becomes a message on stderr and exit code 2, Ctrl-C exit code 130.

    flags: the program's flags of fields, where they differ from the fields' names.
    """
    try:
        with readers_may_leave():
            main()
    except (UserError, KeyboardInterrupt) as error:
        _end(error, flags or {})


def report_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print the traceback of an error that nothing caught, as `sys.excepthook`. Ctrl-C ends the program with a line,
    and a user's error, such as two policies of a name when flags are made, with its message."""
    if isinstance(error, UserError | KeyboardInterrupt):
        _end(error, {})
    sys.__excepthook__(kind, error, frames)


def _end(error: UserError | KeyboardInterrupt, flags: Mapping[str, str]) -> NoReturn:
    """End the program with a line on stderr, and an exit code."""
    if isinstance(error, UserError):
        tell(f"error: {error.with_flags(flags)}")
        sys.exit(2)
    tell("interrupted")
    sys.exit(INTERRUPTED_CODE)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """End the program with UNREAD_CODE and without a message if the reader of its output has left. Escape characters
    that stdout's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end: the rest of the output goes to /dev/null, or it would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD_CODE)


def tell(message: str) -> None:
    """Print a message on stderr, if that is still open."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
