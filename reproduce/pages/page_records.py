"""The records that pages are made of: which of them count, their tables, and how a page refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.jsonl import read_lines
from common.tables import Column, markdown
from engine.bench.config import AUTO
from reproduce.paper.columns import NONE, machine_name
from reproduce.paper.published import Record
from reproduce.paper.reproduction import ACCEPTANCE, COST_MODEL, SPEEDUPS
from reproduce.sweeping.runner import OK, read_rows

GPU = "gpu.jsonl"


@dataclass(frozen=True)
class Records:
    """What is in the folder of results: runs of speculation, of acceptance, costs of random weights, and the cost
    model's own: its grids, and the runs that it is compared with.
    """

    speculation: list[Record]
    acceptance: list[Record]
    costs: list[Record]
    cost_model: list[Record]


def read_records(folder: Path) -> Records:
    """Only what was measured: rows of cells that went well. Each record says in `file` where it is."""
    runs = [record for record in _swept(folder, SPEEDUPS) if _is_fixed(record)]
    gpu = [record for record in read(folder, GPU, "gpu_costs") if record.get("status") == "done" and _is_fixed(record)]
    costs = [record for record in runs if record.get("load_format") == "dummy"]
    return Records(
        [record for record in runs if record.get("load_format") != "dummy"],
        _swept(folder, ACCEPTANCE),
        [*costs, *gpu],
        _swept(folder, COST_MODEL),
    )


def _swept(folder: Path, name: str) -> list[Record]:
    rows = read_rows(folder / name).values()
    return [row["record"] | {"file": name} for row in rows if row["status"] == OK]


def _is_fixed(record: Record) -> bool:
    """Whether gamma and budget were numbers: what is chosen anew in every round has no published counterpart."""
    return isinstance(record.get("gamma"), int) and record.get("draft_budget") != AUTO


def read(folder: Path, name: str, *benchmarks: str) -> list[Record]:
    """The file's records of those kinds that count: the last one of each cell, and none of a quick run.

    Errors: DataError naming a line that is no record.
    """
    kept: dict[object, Record] = {}
    for number, record in read_lines(folder / name):
        if not isinstance(record, dict):
            raise DataError(
                "a line is not a record",
                where=f"{folder / name}, line {number}",
                seen=str(record)[:80],
                required="a JSON object",
                fix="delete this line, and measure again what it recorded",
            )
        if record.get("benchmark") in benchmarks and not record.get("quick") and record.get("status") != "skipped":
            key = (record["benchmark"], record["cell"]) if "cell" in record else number
            kept.pop(key, None)
            kept[key] = record | {"file": name}
    return list(kept.values())


def link(text: str, record: Record) -> str:
    return f"[{text}](results/{record['file']})"


def source(records: Sequence[Record], results: str = "results") -> str:
    """Which files in the folder `results`, as seen from the page, commits and machines a table comes from."""
    files = dict.fromkeys(record["file"] for record in records)
    commits = dict.fromkeys((record.get("git_commit") or "unknown")[:12] for record in records)
    machines = dict.fromkeys(map(_machine, records))
    return (
        f"Record: {', '.join(f'[{name}]({results}/{name})' for name in files)}; "
        f"commit {', '.join(f'`{commit}`' for commit in commits)}; {'; '.join(machines)}."
    )


def _machine(record: Record) -> str:
    triton = f", Triton {record['triton_version']}" if record.get("triton_version") else ""
    return f"{machine_name(record)}, PyTorch {record.get('torch_version')}{triton}"


def table(what: str, records: Sequence[Record], columns: Sequence[Column], file: str, results: str = "results") -> str:
    """A row per record, and where they come from; or that there are none."""
    if not records:
        return absent(what, file, results)
    return f"{markdown(records, columns)}\n\n{source(records, results)}"


def absent(what: str, file: str, results: str = "results") -> str:
    return f"{what}: {NONE} (no such record in `{results.removeprefix('../')}/{file}`)."
