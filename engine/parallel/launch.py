"""Runs a script's `main` so that every failure ends in a clear message and a non-zero exit code.

Under torchrun several processes run it. A rank that fails reports to torchrun, which ends the others. Ranks that
merely lose a peer wait for that end, so that torchrun names the rank that failed.
"""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.errors import RankError, UserError, flag
from common.exit import exit_on_user_error, readers_may_leave, tell
from common.process import is_leader, rank, world_size

USER_ERROR_CODE, LOST_RANK_CODE = 2, 3
# Ranks wait so long for torchrun to end them; it looks at its processes ten times a second.
LINGER_SECONDS = 10
# Errors of gloo and NCCL about a peer. Any other error is this rank's, and keeps its traceback.
LOST_RANK = re.compile(
    "connection (closed by peer|reset by peer|refused)|broken pipe|(socket|wait) timeout|timed out"
    "|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
_REPORTED = "foretoken/user_error"
Answer = TypeVar("Answer")


def end_on_ranks(main: Callable[[], None], flags: Mapping[str, str]) -> None:
    """Run a program's `main` on this rank, or as the only process; user errors become exit codes."""
    (exit_on_user_error if world_size() == 1 else run_on_ranks)(main, flags)


def run_on_ranks(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run `main` on this rank. Exit codes: 2 for a user error, 3 for a lost rank, 141 if the reader of the output left,
    1 for a bug."""
    code = 0
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        _report_user_error(error, error.with_flags(flags or {}))
        code = USER_ERROR_CODE
    except Exception as error:
        of_ranks = isinstance(error, RuntimeError) and (dist.is_initialized() or isinstance(error, dist.DistError))
        if not of_ranks or not LOST_RANK.search(str(error)):
            get_error_handler().record_exception(error)
            raise
        _report_lost_rank(error)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(LOST_RANK_CODE)  # freeing symmetric memory would wait for kernels, which wait for the lost rank
    # Destroying a communicator never ends while a CUDA graph with a collective is alive (pytorch #115388). By now no
    # traceback refers to the frames of main.
    gc.unfreeze()
    gc.collect()
    if code:
        sys.exit(code)
    dist.destroy_process_group()


def _report_user_error(error: UserError, message: str) -> None:
    """Print an error once: if several ranks have the same error, on the leader, else on the first of them."""
    if not is_leader():
        time.sleep(LINGER_SECONDS)  # until the leader has the error, too, and torchrun ends this rank
    if _on_store(lambda store: store.add(f"{_REPORTED}/{message}", 1) == 1, True):
        _on_store(lambda store: store.set(_REPORTED, message), None)
        tell(f"error: {message}" if is_leader() else f"\nerror on rank {rank()}: {message}")
    # Without the traceback: torchrun's summary repeats the message, and our frames are nobody's business.
    get_error_handler().record_exception(error.with_traceback(None))


def _report_lost_rank(error: Exception) -> None:
    """Print that a rank was lost unless a rank has printed why, and give torchrun the time to name a rank that died."""
    hangs = re.search("timed out|wait timeout", str(error), re.IGNORECASE)
    if not _on_store(lambda store: store.check([_REPORTED]), False):
        how = f"did not answer in time ({flag('rank_timeout')})" if hangs else "died"
        what = f"rank {rank()} lost another rank, which {how}"
        fix = "see which rank torchrun names as the first to fail; if it names this rank, look at the other ranks; "
        fix += f"rows that had finished are in {flag('save_rows')}, if it was given"
        lost = RankError(what, "a collective", error, "an answer of every rank", fix)
        tell(f"\nerror: {lost}")
    if hangs:
        frames = error.__traceback__
        get_error_handler().record_exception(error.with_traceback(None))
        error.with_traceback(frames)  # freeing them could wait for the lost rank
    else:
        time.sleep(LINGER_SECONDS)


def _on_store(do: Callable[[dist.Store], Answer], otherwise: Answer) -> Answer:
    """Call `do` with the store that ranks share; return `otherwise` if there is no store, or it is gone."""
    try:
        return do(dist.distributed_c10d._get_default_store())
    except (RuntimeError, ValueError):
        return otherwise
