"""The one place that turns what a user can cause into an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from common.errors import UserError
from common.pipes import readers_may_leave, tell


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
