"""The exceptions a user can cause, and the one place that turns them into an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Bad input, told as: what is wrong, where, the value seen, the value required, one fix."""

    def __init__(self, what: str, *, where: str, seen: object, required: object, fix: str) -> None:
        super().__init__(f"{what}\n  where:    {where}\n  seen:     {seen}\n  required: {required}\n  fix:      {fix}")


class ConfigError(UserError):
    """A model, cache or run configuration that cannot work."""


class CheckpointError(UserError):
    """A checkpoint file that is missing, damaged, or of another model."""


class DataError(UserError):
    """Text that is missing, unreadable, or too short for the prompts asked of it."""


class RankError(UserError):
    """Processes of one run that disagree, or that lost each other."""


class OutOfMemoryError(UserError):
    """Weights and caches that would not fit, found before anything is allocated."""


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a command line's `main`; a `UserError` becomes one message on stderr and exit code 2.

    A reader of the output that leaves before its end, as in `... | head`, ends the program quietly with exit code 1.
    """
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again, and complain
        sys.exit(1)
