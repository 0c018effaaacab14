"""This process among those that torchrun started: its rank, and how many there are."""

import os
from functools import partial

LEADER = 0


def _said(name: str, alone: int) -> int:
    return int(os.environ.get(name, alone))


own_rank = partial(_said, "RANK", LEADER)
# How many processes torchrun started.
world_size = partial(_said, "WORLD_SIZE", 1)
# This process's number among those of its machine, and how many these are.
local_rank = partial(_said, "LOCAL_RANK", 0)
local_world_size = partial(_said, "LOCAL_WORLD_SIZE", 1)


def is_leader() -> bool:
    """Return True on the process that prints for all."""
    return own_rank() == LEADER
