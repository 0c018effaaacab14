"""The one place that turns what a user can cause into an exit code."""

import sys
from collections.abc import Callable, Mapping

from common.errors import UserError
from common.pipes import readers_may_leave, tell


def exit_on_user_error(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run a program's `main`; a `UserError` becomes one message on stderr, with `flags` for names of fields that are
    not the program's, and exit code 2.
    """
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        tell(f"error: {error.told(flags or {})}")
        sys.exit(2)
