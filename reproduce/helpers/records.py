"""Read records of runs: of benchmarks, sweeps and the programs of this folder; and select among their rows."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import bench
from bench.draft_flags import parse_value
from common.errors import DataError, refuse
from common.jsonl import read_lines

Record = dict[str, Any]
# What a run measured as a whole, and its rows or stretches measured apart.
OF_WHOLE = ("by_row", "acceptance_standard_error", "speedups")


def read_records(path: str | Path) -> list[Record]:
    """Return the records of a file of JSON lines, with the options of the target and the draft at the top. The row of a
    sweep's failed cell has none. Errors: DataError for a file that is missing or has no record."""
    found = []
    for number, line in read_lines(path):
        if not isinstance(line, dict):
            fix = "name a file that a benchmark or a sweep appended to"
            refuse(f"{path}, line {number}", str(line)[:80], "a JSON object", "a line is not a record", fix, DataError)
        record = line.get("record", line)
        if record is not None:
            found.append(record.get("config", {}).get("target", {}) | record | bench.options_of(record))
    if not found:
        seen = "no record" if Path(path).exists() else "no such file"
        refuse(Path(path), seen, "a file of records", "there are no records", "name a file with records", DataError)
    return found


def rows_of(records: Iterable[Record], each: str = "rows") -> list[Record]:
    """Return each row of the records' lists of that name, with the settings of its run; a record without the list is a
    row."""
    return [
        {name: value for name, value in record.items() if name not in OF_WHOLE} | row
        for record in records
        for row in record.get(each) or [record]
    ]


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Return the records of each key, in the order of the keys' first records."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def parse_values(text: str) -> list[Any]:
    """Return the values of `v1,v2`."""
    values = parse_value(f"[{text}]")
    return values if isinstance(values, list) else [parse_value(part.strip()) for part in text.split(",")]


def parse_condition(text: str) -> tuple[str, list[Any]]:
    """Return the name and the values of `name=v1,v2`, in which `none` stands for what a row lacks."""
    name, _, values = text.partition("=")
    return name, [None if value == "none" else value for value in parse_values(values)]


def selected(rows: Sequence[Record], conditions: Iterable[str]) -> list[Record]:
    """Return the rows that fulfil every condition. Errors: DataError if none does."""
    for condition in conditions:
        name, values = parse_condition(condition)
        left = [row for row in rows if row.get(name) in values]
        if not left:
            found = sorted({str(row[name]) for row in rows if row.get(name) is not None})
            required = f"{name} of {', '.join(found[:12])}" if found else ", ".join(sorted({*rows[0]})[:60])
            what = "no row is as described" if found else "the rows have no such column"
            refuse(f"the condition {condition}", name, required, what, "choose among these", DataError)
        rows = left
    return [*rows]
