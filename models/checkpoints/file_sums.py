"""SHA-256 sums of files, computed once for each version of a large file on a machine."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import suppress
from pathlib import Path

from models.cpp_build import cache_folder

REMEMBERED_FROM = 1 << 20  # bytes; what is smaller is as quickly read again
# Two changes within one tick of a file system's clock leave the same times.
SETTLED_NS = 20_000_000


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, from the cache folder if this version of the file was read before.

    A version is a device, an inode, a size, and the times at which content and inode last changed: what any program
    writes is another one. What a disk changes by itself is not; `sha256_of` finds that. The cache folder is that of
    `cpp_build`; where it cannot be written, every call reads the file. Ranks that start together each read it once.
    """
    stat = path.stat()
    if stat.st_size < REMEMBERED_FROM:
        return sha256_of(path)
    version = version_of(path)
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: a user without a home folder
        known = (cache_folder() / "sha256" / version).read_text(encoding="utf-8")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    unsettled = SETTLED_NS - (time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns))
    if unsettled > 0:
        time.sleep(min(unsettled, SETTLED_NS) / 1e9)
    seen = sha256_of(path)
    if version_of(path) == version:
        with suppress(OSError, RuntimeError):
            note = cache_folder() / "sha256" / version
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(seen, encoding="utf-8")
    return seen


def version_of(path: Path) -> str:
    """What tells one version of a file from another."""
    stat = path.stat()
    return "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
