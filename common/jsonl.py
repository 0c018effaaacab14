"""Read JSON, and append records to files of JSON lines."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError, UserError, refuse
from common.say import say


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Errors: ValueError saying why there is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(why_no_value(error)) from None


def why_no_value(error: BaseException | None) -> str:
    """Return why `json.loads` raised an error, also for JSON that is beyond Python's limits."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if type(error) is ValueError:
        return f"an integer of more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def require_appendable(path: str | None, field: str = "output") -> None:
    """Make the folder of `path` if only that is missing; raise ConfigError unless a record can be appended to `path`.
    Called before a run."""
    if path is None:
        return
    what = "a file cannot be written"
    if os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK):
        with open(path, "rb") as file:
            fits, what = file.read(1) in (b"", b"{"), "a file has other content than JSON"
    else:
        folder = Path(path).resolve().parent
        if path and not folder.exists() and os.access(folder.parent, os.W_OK):
            folder.mkdir()
        fits = bool(path) and not os.path.exists(path) and os.access(folder, os.W_OK)
    if not fits:
        required = "a writable file of JSON, or a new one in a writable folder"
        refuse(field, path or "an empty name", required, what, "choose another file")


def append_record(path: str | None, *records: dict[str, Any]) -> None:
    """Append JSON lines and flush them to disk; begin a new line if a killed run left the last line unfinished. Errors:
    ConfigError for any error of the system."""
    if path is None:
        return
    try:
        with open(path, "a+b") as file:
            end = b"\n"
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                end = file.read()
            lines = "".join(f"{json.dumps(record)}\n" for record in records)
            file.write((b"" if end == b"\n" else b"\n") + lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        required, fix = "a file that can be written, and room on the disk", "make room; the record is printed"
        raise ConfigError("a record could not be appended", path, error, required, fix) from None


def append_or_put_off(path: str | None, record: dict[str, Any], put_off: list[UserError]) -> None:
    """Append a record; if that fails, print it and add the error to `put_off`, so that the run can go on."""
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
    """Print the texts and then the record, and append the record to `path`, even if printing fails.

    for_people: without a `path`, print no record to a terminal. Errors: ConfigError if it was not appended, or the
    first error in `put_off`; OSError if it was not printed.
    """
    is_hidden = for_people and path is None and sys.stdout.isatty()
    try:
        for line in (*texts, *([] if is_hidden else [json.dumps(record)])):
            print(line, flush=True)
    finally:
        append_record(path, record)
    if put_off:
        raise put_off[0]


# The strings of a line; the last may have no end.
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.?)*+"?')


def _is_torn(line: bytes) -> bool:
    """Return whether a line is the beginning of a JSON object whose writer was killed."""
    brackets = _STRINGS.sub(b"", line)
    return line.startswith(b"{") and brackets.count(b"{") > brackets.count(b"}")


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file, with the numbers of their lines; the text of a line without JSON, and a reason
    for JSON that Python does not read.

    Empty lines are skipped, and so are objects without an end, since their writer was killed. Errors: DataError for a
    file that cannot be read.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        required, fix = "a file of JSON lines", "name another file"
        refuse(Path(path), error.strerror, required, "a file cannot be read", fix, DataError)
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except (UnicodeError, json.JSONDecodeError):
            if line.strip() and not _is_torn(line):
                yield number, line.decode(errors="replace")
        except (ValueError, RecursionError) as error:
            yield number, why_no_value(error)
