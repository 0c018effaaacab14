"""Several processes that run one model."""

from collections.abc import Callable, Mapping

from common.exit import exit_on_user_error
from common.process import world_size
from engine.parallel.launch import run_on_ranks


def end_on_ranks(main: Callable[[], None], flags: Mapping[str, str]) -> None:
    """Run a program's `main` on this rank, or alone; what a user can cause becomes an exit code."""
    if world_size() == 1:
        exit_on_user_error(main, flags)
        return
    run_on_ranks(main, flags)
