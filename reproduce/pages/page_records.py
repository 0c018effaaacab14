"""The records that reproduce/README.md is made of, and how it refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.settings import AUTO
from reproduce.paper.reproduction import ACCEPTANCE, COST_MODEL, SPEEDUPS, Record, machine_name
from reproduce.performance_page import read
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
        [*costs, *(record | {"file": GPU} for record in gpu)],
        _swept(folder, COST_MODEL),
    )


def _swept(folder: Path, name: str) -> list[Record]:
    rows = read_rows(folder / name).values()
    return [row["record"] | {"file": name} for row in rows if row["status"] == OK]


def _is_fixed(record: Record) -> bool:
    """Whether gamma and budget were numbers: what is chosen anew in every round has no published counterpart."""
    return isinstance(record.get("gamma"), int) and record.get("draft_budget") != AUTO


def link(text: str, record: Record) -> str:
    return f"[{text}](results/{record['file']})"


def source(records: Sequence[Record]) -> str:
    """Which files, commits and machines a table comes from."""
    files = dict.fromkeys(record["file"] for record in records)
    commits = dict.fromkeys((record.get("git_commit") or "unknown")[:12] for record in records)
    machines = dict.fromkeys(f"{machine_name(record)}, PyTorch {record.get('torch_version')}" for record in records)
    return (
        f"Record: {', '.join(f'[{name}](results/{name})' for name in files)}; "
        f"commit {', '.join(f'`{commit}`' for commit in commits)}; {'; '.join(machines)}."
    )
