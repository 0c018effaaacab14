"""The number of this process and of all processes, as set by torchrun."""

import os

LEADER = 0


def rank() -> int:
    return int(os.environ.get("RANK", LEADER))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Return the number of this process among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_leader() -> bool:
    """True in the process that speaks for all."""
    return rank() == LEADER
