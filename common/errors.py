"""Errors that a user can cause."""

import copyreg
import sys
from collections.abc import Mapping
from functools import partial
from typing import NoReturn


def flag(field: str) -> str:
    """Mark a field of the configuration in a message; `UserError.with_flags` replaces it by the program's flag."""
    return f"\0{field}\0"


class UserError(Exception):
    """Describes bad input: what is wrong, where, the value seen, the value required, and a fix."""

    def __init__(self, what: str, where: object, seen: object, required: object, fix: str) -> None:
        self.what, self.where, self.seen = what, str(where), str(seen)
        super().__init__(f"{what}\n  where:    {where}\n  seen:     {seen}\n  required: {required}\n  fix:      {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message instead of the five arguments, so that another process can raise the error."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def with_flags(self, flags: Mapping[str, str]) -> str:
        """Return the message with the flag of each field: the field's entry in `flags`, or else its name."""
        parts = str(self.args[0]).split("\0")
        return "".join(flags.get(part, f"--{part}") if i % 2 else part for i, part in enumerate(parts))

    def __str__(self) -> str:
        return self.with_flags({})


class ConfigError(UserError):
    """A model, cache or run configuration that cannot work."""


class CheckpointError(UserError):
    """A checkpoint file that is missing, damaged, or of another model."""


class DataError(UserError):
    """Texts that are missing, unreadable, or too short for the prompts."""


class RankError(UserError):
    """Processes of one run that disagree, or that lost each other."""


class OutOfMemoryError(UserError):
    """Weights, caches and activations that do not fit into memory."""


def refuse(
    field: object,
    seen: object,
    required: object,
    what: str = "",
    fix: str = "",
    error: type[UserError] = ConfigError,
) -> NoReturn:
    """Raise an error for a value of a field of the configuration, or of another place that `field` describes.

    field: an identifier is a field, whose flag the message names; give paths as `Path`.
    what: what is wrong, if the field and the required value do not say it. fix: default, to use the required value.
    """
    where = flag(field) if isinstance(field, str) and field.isidentifier() else str(field)
    message = what or f"{where} is not {required}"
    raise error(message, where, seen, required, fix or f"use {where} {required}") from None


# For files of a checkpoint that are missing, damaged, or of another model.
MAKE_AGAIN = "download the checkpoint again (download.py), and convert it again (convert_hf_checkpoint.py --force)"
refuse_checkpoint = partial(refuse, fix=MAKE_AGAIN, error=CheckpointError)


def require_at_least(field: str, value: float, minimum: float, maximum: float = sys.float_info.max) -> None:
    """Raise ConfigError unless a field of the configuration is a finite number from `minimum` to `maximum`."""
    if value < minimum:
        refuse(field, value, f">= {minimum}", f"{flag(field)} is too small", f"use {flag(field)} {minimum} or more")
    if not value <= maximum:  # NaN, too
        refuse(field, value, f"{minimum} to {maximum:g}", fix="use a number in that range")
