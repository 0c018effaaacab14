"""Running a script's `main` so that every way to fail ends in one clear message and a non-zero exit code.

Under torchrun several processes run it. Whichever fails tells torchrun, which ends the others; those that
merely lose a peer wait for that, so that the rank that failed is the one that is named.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.errors import RankError, UserError
from common.exit import exit_on_user_error
from common.pipes import readers_may_leave, tell
from common.process import is_leader, own_rank, world_size
from engine.parallel.ranks import LINGER_SECONDS

USER_ERROR_CODE, LOST_RANK_CODE = 2, 3
# What gloo and NCCL say of a peer; any other error of theirs is this rank's own, and keeps its traceback.
LOST_RANK_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "timed out",
    "remote process exited",
    "communicator was aborted",
)
_TOLD = "foretoken/user_error"


def run_on_ranks(main: Callable[[], None], flags: Mapping[str, str] | None = None) -> None:
    """Run `main` on this rank. Exit codes: 2 for a user error, 3 for a lost rank, 141 for a reader of the output that
    left, 1 for a bug.

    Garbage is collected before a communicator goes: while a CUDA graph with a collective is alive, that never ends
    (pytorch #115388).
    """
    if world_size() == 1:
        exit_on_user_error(main, flags)
        return
    code = 0
    try:
        with readers_may_leave():
            main()
    except UserError as error:
        _tell_user_error(error, error.told(flags or {}))
        code = USER_ERROR_CODE
    except KeyboardInterrupt:
        if is_leader():
            tell("\ninterrupted")
        sys.exit(130)
    except RuntimeError as error:
        if not _is_lost_rank(error):
            _tell_torchrun(error)
            raise
        _report_lost_rank(error)
        sys.exit(LOST_RANK_CODE)
    except Exception as error:
        _tell_torchrun(error)
        raise
    gc.collect()  # now that no traceback holds main's frames
    if code:
        sys.exit(code)
    dist.destroy_process_group()


def _tell_user_error(error: UserError, message: str) -> None:
    """Say it once: what all ranks find together is said by the first, the leader's own by the leader, and a rank
    with an error of its own names itself."""
    if isinstance(error, RankError):
        if _is_first():
            tell(f"\nerror: {message}")
    elif is_leader():
        _store_set(_TOLD, message)
        tell(f"error: {message}")
    elif not _leader_says(message):
        _store_set(_TOLD, message)
        tell(f"\nerror on rank {own_rank()}: {message}")
    # Without the traceback: torchrun's summary repeats the message, and our frames are nobody's business.
    _tell_torchrun(error.with_traceback(None))


def _leader_says(message: str) -> bool:
    """Whether the leader comes to the same error; it is given some time to."""
    deadline = time.monotonic() + LINGER_SECONDS
    while (told := _store_get(_TOLD)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return told == message


def _tell_torchrun(error: Exception) -> None:
    """Write the file from which torchrun's summary takes the failing rank's error."""
    get_error_handler().record_exception(error)


def _is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective, or joining the others, failed because of another process."""
    of_ranks = dist.is_initialized() or isinstance(error, dist.DistError)
    return of_ranks and any(sign in str(error).lower() for sign in LOST_RANK_SIGNS)


def _report_lost_rank(error: RuntimeError) -> None:
    """Say what was lost unless another rank has told why, and leave torchrun the time to name a rank that died."""
    hangs = "timed out" in str(error).lower()
    if _store_get(_TOLD) is None:
        what = "did not answer in time (--rank_timeout)" if hangs else "died"
        fix = "see which rank torchrun names as the first to fail, and why"
        if hangs:
            others = [rank for rank in range(world_size()) if rank != own_rank()]
            fix = (
                f"look at what rank {' or '.join(map(str, others))} is doing; torchrun will name this one, which waited"
            )
        tell(
            f"\nerror: rank {own_rank()} lost another rank, which {what}\n"
            f"  where:    a collective of all ranks\n"
            f"  seen:     {error}\n"
            f"  required: an answer of every rank\n"
            f"  fix:      {fix}; rows that had finished are in --save_rows, if it was given"
        )
    if hangs:
        _tell_torchrun(error.with_traceback(None))
    else:
        time.sleep(LINGER_SECONDS)


def _is_first() -> bool:
    """Whether no other rank has asked this before."""
    try:
        return dist.distributed_c10d._get_default_store().add(f"{_TOLD}/count", 1) == 1
    except (RuntimeError, ValueError):
        return True


def _store_get(key: str) -> str | None:
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.get(key).decode() if store.check([key]) else None
    except (RuntimeError, ValueError):  # no process group yet, or its store went with the rank that kept it
        return None


def _store_set(key: str, value: str) -> None:
    try:
        dist.distributed_c10d._get_default_store().set(key, value)
    except (RuntimeError, ValueError):
        return
