"""Errors that name the flags of the program that was called, where others check its values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from common.errors import UserError


@contextmanager
def flags_named(names: Mapping[str, str]) -> Iterator[None]:
    """For a program that calls some of a benchmark's flags otherwise: errors name its own, `{"gamma": "gammas"}`."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"(?<!\w)--(\w+)", lambda flag: f"--{names.get(flag[1], flag[1])}", str(error)),)
        raise
