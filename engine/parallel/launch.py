"""Runs a script's `main` so that every failure ends in one clear message and a non-zero exit code.

Under torchrun several processes run it. Whichever fails tells torchrun, which ends the others; those that
merely lose a peer wait for that, so that the rank that failed is the one that is named.
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
from common.exit import readers_may_leave, tell
from common.process import is_leader, rank

USER_ERROR_CODE, LOST_RANK_CODE = 2, 3
# torchrun looks at its processes ten times a second: in this time it ends ranks that wait for their end.
LINGER_SECONDS = 10
# Errors of gloo and NCCL about a peer; any other error of theirs is this rank's, and keeps its traceback.
LOST_RANK = re.compile(
    "connection (closed by peer|reset by peer|refused)|broken pipe|socket timeout|timed out|remote process exited"
    "|communicator was aborted",
    re.IGNORECASE,
)
_TOLD = "foretoken/user_error"
Answer = TypeVar("Answer")


def run_on_ranks(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run `main` on this rank. Exit codes: 2 for a user error, 3 for a lost rank, 141 for a reader of the output that
    left, 1 for a bug.

    Garbage is collected before a communicator goes: while a CUDA graph with a collective is alive, that never ends
    (pytorch #115388).
    """
    code = 0
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        _tell_user_error(error, error.with_flags(flags or {}))
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
    gc.collect()  # now that no traceback holds main's frames
    if code:
        sys.exit(code)
    dist.destroy_process_group()


def _tell_user_error(error: UserError, message: str) -> None:
    """Print an error once: ranks that find the same leave it to the leader, or else to the first of them."""
    if not is_leader():
        time.sleep(LINGER_SECONDS)  # for the leader to find it, too, and torchrun to end this rank
    if _on_store(lambda store: store.add(f"{_TOLD}/{message}", 1) == 1, True):
        _on_store(lambda store: store.set(_TOLD, message), None)
        tell(f"error: {message}" if is_leader() else f"\nerror on rank {rank()}: {message}")
    # Without the traceback: torchrun's summary repeats the message, and our frames are nobody's business.
    get_error_handler().record_exception(error.with_traceback(None))


def _report_lost_rank(error: Exception) -> None:
    """Print what was lost unless another rank has said why, and leave torchrun the time to name a rank that died."""
    hangs = "timed out" in str(error).lower()
    if not _on_store(lambda store: store.check([_TOLD]), False):
        how = f"did not answer in time ({flag('rank_timeout')})" if hangs else "died"
        what = f"rank {rank()} lost another rank, which {how}"
        fix = "see which rank torchrun names as the first to fail, or if it names this one, what the others are doing; "
        fix += f"rows that had finished are in {flag('save_rows')}, if it was given"
        lost = RankError(what, "a collective", error, "an answer of every rank", fix)
        tell(f"\nerror: {lost}")
    if hangs:
        frames = error.__traceback__
        get_error_handler().record_exception(error.with_traceback(None))
        error.with_traceback(frames)  # which are not to be freed
    else:
        time.sleep(LINGER_SECONDS)


def _on_store(do: Callable[[dist.Store], Answer], otherwise: Answer) -> Answer:
    """Return `do` of the store that ranks share; `otherwise` where there is none, or none any more."""
    try:
        return do(dist.distributed_c10d._get_default_store())
    except (RuntimeError, ValueError):
        return otherwise
