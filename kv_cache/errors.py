"""The exceptions a user can cause, and the one place that turns them into an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kv_cache.pipes import readers_may_leave, tell


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
    """Run a command line's `main`; a `UserError` becomes one message on stderr and exit code 2."""
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        tell(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(130)
