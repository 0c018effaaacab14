"""Read records of runs: of benchmarks, sweeps and the programs of this folder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bench
from common.errors import DataError, refuse
from common.jsonl import read_lines

Record = dict[str, Any]


def read_records(path: str | Path) -> list[Record]:
    """Return the records of a file of JSON lines. The row of a sweep's failed cell has none. Errors: DataError."""
    found = []
    for number, line in read_lines(path):
        if not isinstance(line, dict):
            fix = "name a file that a benchmark or a sweep appended to"
            refuse(f"{path}, line {number}", str(line)[:80], "a JSON object", "a line is not a record", fix, DataError)
        record = line.get("record", line)
        if record is not None:
            found.append(with_current_names(record | bench.options_of(record)))
    return found


def with_current_names(record: Record) -> Record:
    """Return an older record with today's names, also in its rows: `verified` was `judged`, and some scripts called the
    speedup until the last row `speedup`."""
    renamed = {"verified" if key == "judged" else key: value for key, value in record.items()}
    if isinstance(rows := record.get("rows"), list):
        renamed["rows"] = [with_current_names(row) for row in rows]
    if record.get("benchmark") in ("spec_bench", "context_sweep"):
        renamed["rows"] = [{"wall_speedup": row["speedup"]} | row for row in renamed["rows"]]
    return renamed


def rows_of(records: Iterable[Record]) -> list[Record]:
    """Return each row of the records' tables, with the settings of its run; a record without a table is a row."""
    return [record | row for record in records for row in record.get("rows", [{}])]


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Return the records of each key, in the order of the keys' first records."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found
