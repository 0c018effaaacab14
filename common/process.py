"""The rank that torchrun gave this process, and how many processes there are."""

import os
from functools import partial

LEADER = 0


def _said(name: str, alone: int) -> int:
    return int(os.environ.get(name, alone))


own_rank = partial(_said, "RANK", LEADER)
# The number of processes that torchrun started.
world_size = partial(_said, "WORLD_SIZE", 1)
# This process's number on its machine, and how many run there.
local_rank = partial(_said, "LOCAL_RANK", 0)
local_world_size = partial(_said, "LOCAL_WORLD_SIZE", 1)


def is_leader() -> bool:
    """Return whether this is the process that speaks for all."""
    return own_rank() == LEADER
