"""The exceptions a user can cause."""

import copyreg
from collections.abc import Mapping


def flag(field: str) -> str:
    """A field of the configuration in a message: whoever prints it knows what the program calls it."""
    return f"\0{field}\0"


class UserError(Exception):
    """Bad input: what is wrong, where, the value seen, the value required, and a fix."""

    def __init__(self, what: str, where: object, seen: object, required: object, fix: str) -> None:
        self.what, self.seen = what, str(seen)
        super().__init__(f"{what}\n  where:    {where}\n  seen:     {seen}\n  required: {required}\n  fix:      {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message, for the error of another process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def told(self, flags: Mapping[str, str]) -> str:
        """The message, with each field under its own name as a flag, or under that which `flags` has for it."""
        parts = str(self.args[0]).split("\0")
        return "".join(flags.get(part, f"--{part}") if odd % 2 else part for odd, part in enumerate(parts))

    def __str__(self) -> str:
        return self.told({})


class ConfigError(UserError):
    """A model, cache or run configuration that cannot work."""


class CheckpointError(UserError):
    """A checkpoint file that is missing, damaged, or of another model."""


class DataError(UserError):
    """Text that is missing, unreadable, or too short for the prompts."""


class RankError(UserError):
    """Processes of one run that disagree, or that lost each other."""


class OutOfMemoryError(UserError):
    """Weights and caches that would not fit, found before anything is allocated."""


def require_at_least(field: str, value: float, minimum: float) -> None:
    """Raise ConfigError if a field of the configuration is below `minimum`."""
    if value < minimum:
        what, fix = f"{flag(field)} is too small", f"use {flag(field)} {minimum} or more"
        raise ConfigError(what, flag(field), value, f">= {minimum}", fix)
