"""The CPU's attention kernel, built at its first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from models.cpp_build import BuildError, load_library

__all__ = ["BuildError", "load_kernel"]

SOURCE = Path(__file__).with_name("cpp_kernel.cpp")


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """The compiled kernel, built first where it has to be. Errors: BuildError."""
    return load_library(SOURCE, "attention")
