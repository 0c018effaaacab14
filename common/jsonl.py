"""Files of JSON lines: records appended to them, and read from them."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError, flag
from common.say import say


def require_appendable(path: str | None, field: str = "output") -> None:
    """Raise ConfigError unless a record can be appended to `path`: found out before a run, not after it."""
    if path is None:
        return
    if os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK):
        with open(path, "rb") as file:
            fits = file.read(1) in (b"", b"{")
    else:
        fits = bool(path) and not os.path.exists(path) and os.access(Path(path).resolve().parent, os.W_OK)
    if not fits:
        required, fix = "a writable file of JSON lines, or a new one in a writable folder", "choose another file"
        raise ConfigError("a file cannot be written", flag(field), path or "an empty name", required, fix)


def append_record(path: str | None, record: dict[str, Any]) -> None:
    """Append a JSON line and force it to disk, behind a line break if a killed run left its last line unfinished.

    Errors: ConfigError, whatever the system's reason.
    """
    if path is None:
        return
    try:
        with open(path, "a+b") as file:
            end = b"\n"
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                end = file.read()
            file.write((b"" if end == b"\n" else b"\n") + json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        required = "a file that can be written, and room on the disk"
        fix = "make room, or choose another file; what was not appended is printed"
        raise ConfigError("a record could not be appended", path, error, required, fix) from None


def append_or_put_off(path: str | None, record: dict[str, Any], put_off: list[UserError]) -> None:
    """Append a record; if that fails, print the record, warn once, and put the error off, so that the run goes on."""
    try:
        append_record(path, record)
    except UserError as error:
        if not put_off:
            say(f"\nwarning: {error}")
        put_off.append(error)
        with suppress(OSError):
            print(json.dumps(record), flush=True)


def publish(
    path: str | None, record: dict[str, Any], *texts: str, put_off: Sequence[UserError] = (), for_people: bool = False
) -> None:
    """Print texts and last the record, and append the record to `path`; each is done even if the other fails.

    for_people: do not print a record without `path` on a terminal. Errors: ConfigError if it was not appended, or the
    first that a run `put_off`; OSError if something was not printed.
    """
    is_hidden = for_people and path is None and sys.stdout.isatty()
    try:
        for line in (*texts, *([] if is_hidden else [json.dumps(record)])):
            print(line, flush=True)
    finally:
        append_record(path, record)
    if put_off:
        raise put_off[0]


# The strings of a line, the last of which may have no end.
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.?)*+"?')


def is_torn(line: bytes) -> bool:
    """Return whether a line is a JSON object that is not closed: its writer was killed."""
    brackets = _STRINGS.sub(b"", line)
    return line.startswith(b"{") and brackets.count(b"{") > brackets.count(b"}")


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file with their line numbers; a damaged line as its text.

    Nothing is yielded for a file that is not there, or for an empty or torn line.
    """
    lines = Path(path).read_bytes().split(b"\n") if Path(path).exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if is_torn(line):
                continue
            value = line.decode(errors="replace")
        yield number, value
