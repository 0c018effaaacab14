"""What torchrun says of this process: its rank, and how many there are."""

import os

LEADER = 0


def own_rank() -> int:
    """This process's rank, by what torchrun says."""
    return int(os.environ.get("RANK", LEADER))


def is_leader() -> bool:
    """Whether this is the process that speaks for all."""
    return own_rank() == LEADER


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
