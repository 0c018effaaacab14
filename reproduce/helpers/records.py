"""Read records of runs: of benchmarks, sweeps and the programs of this folder; and select among their rows."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import bench
from bench.draft_flags import parse_value
from common.errors import DataError, flag, refuse
from common.jsonl import read_lines

Record = dict[str, Any]
AXES = ("prefix_len", "B", "draft_budget", "gen_len", "gamma", "temperature", "context", "clients")
SETTINGS = (
    *("benchmark", "model", "draft", "draft_model", "draft_policy", "drafter", "way", "text", "text_drafts"),
    *("task", "category", "storage", "mode"),
    *("draft_layers", "draft_dtype", "draft_weights", "draft_kv_dtype", "dataset", "verification", "top_k", "top_p"),
    *("min_p", "repetition_penalty", "min_tokens", "rope_scaling"),
    *("dtype", "quantize", "kv_dtype", "attention", "compile", "tensor_parallel", "data_parallel", "machine", "gpu"),
    *AXES,
)
# What a run measured as a whole, and its rows or stretches measured apart.
OF_WHOLE = ("by_row", "acceptance_standard_error", "speedups")


def read_records(path: str | Path) -> list[Record]:
    """Return the records of a file of JSON lines, with the options of the target and the draft at the top. The row of a
    sweep's failed cell has none. Errors: DataError for a file that cannot be read or has no record."""
    found = []
    for number, line in read_lines(path):
        if not isinstance(line, dict):
            fix = "name a file that a benchmark or a sweep appended to"
            refuse(f"{path}, line {number}", str(line)[:80], "a JSON object", "a line is not a record", fix, DataError)
        record = line.get("record", line)
        if record is not None:
            found.append(record.get("config", {}).get("target", {}) | record | bench.options_of(record))
            if isinstance(record.get("rows"), int):  # a certificate counts them
                del found[-1]["rows"]
    if not found:
        fix = "name a file with records"
        refuse(Path(path), "no record", "a file of records", "there are no records", fix, DataError)
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


def varying(rows: Sequence[Record], *known: str) -> list[str]:
    """Return the settings that tell apart rows with equal fields `known`: each makes more combinations than those
    before it."""

    def n_combinations(names: Sequence[str]) -> int:
        return len({repr([row.get(name) for name in names]) for row in rows})

    names = [*known]
    for name in dict.fromkeys([*SETTINGS, *bench.option_names()]):
        if name not in known and n_combinations([*names, name]) > n_combinations(names):
            names.append(name)
    return names[len(known) :]


def parse_values(text: str) -> list[Any]:
    """Return the values of `v1,v2`."""
    values = parse_value(f"[{text}]")
    return values if isinstance(values, list) else [parse_value(part.strip()) for part in text.split(",")]


def parse_condition(text: str) -> tuple[str, list[Any]]:
    """Return the name and the values of `name=v1,v2`, in which `none` stands for what a row lacks."""
    name, _, values = text.partition("=")
    return name, [None if value == "none" else value for value in parse_values(values)]


def refuse_name(where: object, name: str, known: Sequence[str], what: str, fix: str = "use {}") -> NoReturn:
    """Raise DataError for a name that is not known, and list the nearest that are. fix: has the nearest of all in the
    place of {}."""
    near = next(iter(get_close_matches(name, known, 1)), "one of these")
    listed = get_close_matches(name, known, 8, cutoff=0.0)
    refuse(where, name, ", ".join(listed) + ", …" * (len(known) > len(listed)), what, fix.format(near), DataError)


def refuse_column(where: object, name: str, rows: Sequence[Record], fix: str = "use {}") -> NoReturn:
    """Raise DataError for a column without values, and list the nearest that have any. fix: see `refuse_name`."""
    known = {name: 0 for row in rows for name, value in row.items() if value is not None}
    refuse_name(where, name, [*known], "no row has a value of this name", fix)


def selected(rows: Sequence[Record], conditions: Iterable[str], of: str = "") -> list[Record]:
    """Return the rows that fulfil every condition. of: says in a message whose these are. Errors: DataError if no row
    does."""
    for condition in conditions:
        name, values = parse_condition(condition)
        left = [row for row in rows if row.get(name) in values]
        if not left:
            where, how = f"the condition {condition}{of}", f"give {flag('where')}" if of else "use"
            if not (known := sorted({str(row[name]) for row in rows if row.get(name) is not None})):
                refuse_column(where, name, rows, f"{how} {{}}=VALUE")
            seen = condition.partition("=")[2]
            refuse_name(where, seen, known, "no row is as described", f"{how} {name}={{}}")
        rows = left
    return [*rows]
