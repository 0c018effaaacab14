"""How a program ends: what a user can cause becomes an exit code, and nobody has to read its output to the end."""

import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from common.errors import UserError

STDOUT, STDERR = 1, 2
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
    """A program that cannot go on because a reader of its output left ends quietly, with UNREAD_CODE, unless it had
    chosen another exit code; a pipe of its own that breaks is an error like any other. What stdout's encoding does not
    have is escaped, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        _flush(STDOUT)
        _flush(STDERR)
    except BaseException as error:
        have_left = [_let_go(STDOUT), _let_go(STDERR)]
        if isinstance(error, BrokenPipeError) and any(have_left):
            sys.exit(UNREAD_CODE)
        raise


def tell(message: str) -> None:
    """Say it on stderr, if anybody still reads there."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    _let_go(STDERR)


def _flush(fd: int) -> None:
    stream = sys.stdout if fd == STDOUT else sys.stderr
    if stream is not None and not stream.closed:
        stream.flush()


def _let_go(fd: int) -> bool:
    """Write out what is buffered; whether the reader has left. Then, or where nothing can be written for another
    reason, the rest goes nowhere: Python flushes once more when it ends, and would complain and exit with 120."""
    try:
        _flush(fd)
        _require_reader(fd)
    except OSError as error:
        _discard(fd)
        return isinstance(error, BrokenPipeError)
    return False


def _discard(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def _require_reader(fd: int) -> None:
    """BrokenPipeError if it has left; where the system cannot tell, only what is still buffered shows it."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise BrokenPipeError
