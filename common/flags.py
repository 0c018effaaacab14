"""Marks which flags `--help` shows."""

from typing import Annotated, TypeVar

T = TypeVar("T")
COMMON = "common"
# `Common[int]`: the type of a field whose flag is among the few that `--help` shows; --help_all shows every one.
Common = Annotated[T, COMMON]
