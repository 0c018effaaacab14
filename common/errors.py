"""The exceptions a user can cause."""

from __future__ import annotations


class UserError(Exception):
    """Bad input, told as: what is wrong, where, the value seen, the value required, one fix."""

    def __init__(self, what: str, *, where: str, seen: object, required: object, fix: str) -> None:
        super().__init__(f"{what}\n  where:    {where}\n  seen:     {seen}\n  required: {required}\n  fix:      {fix}")


class ConfigError(UserError):
    """A model, cache or run configuration that cannot work."""


class CheckpointError(UserError):
    """A checkpoint file that is missing, damaged, or of another model."""


class DataError(UserError):
    """Text that is missing, unreadable, or too short for the prompts asked of it."""


class RankError(UserError):
    """Processes of one run that disagree, or that lost each other."""


class OutOfMemoryError(UserError):
    """Weights and caches that would not fit, found before anything is allocated."""
