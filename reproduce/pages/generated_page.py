"""Pages that are made of records: which of them count, how tables name where they come from, how a page is written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.checkout import ROOT
from common.errors import DataError
from common.jsonl import read_lines
from common.tables import Column, markdown
from reproduce.paper.columns import NONE, machine_name
from reproduce.paper.published import Record

RESULTS, GPU = ROOT / "reproduce" / "results", "gpu.jsonl"
PAGES = Path(__file__).parent


@dataclass(frozen=True)
class NoFlags:
    pass


def write(page: Path, text: str) -> None:
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")


def filled(template: str, values: Mapping[str, str]) -> str:
    """The text of a page: a template of this folder, with a value at each place that it names."""
    return (PAGES / template).read_text(encoding="utf-8").format_map(values)


def read(folder: Path, name: str, *benchmarks: str) -> list[Record]:
    """The file's records that count, of those benchmarks or of all: the last one of each cell, if that did not fail,
    and none of a quick run. Each says in `file` where it is. Errors: DataError naming a line that is no record."""
    kept: dict[object, Record] = {}
    for number, line in read_lines(folder / name):
        if not isinstance(line, dict):
            where, fix = f"{folder / name}, line {number}", "delete this line, and measure again what it recorded"
            raise DataError("a line is not a record", where, str(line)[:80], "a JSON object", fix)
        record = line.get("record", line)  # of a sweep, or by itself
        if line.get("status") == "skipped" or line.get("quick"):
            continue
        key = line.get("key") or ((line.get("benchmark"), line["cell"]) if "cell" in line else number)
        kept.pop(key, None)
        if record and (not benchmarks or record.get("benchmark") in benchmarks):
            kept[key] = record | {"file": name}
    return list(kept.values())


def source(records: Sequence[Record]) -> str:
    """Which files, commits and machines a table comes from."""
    files = dict.fromkeys(f"[{record['file']}](results/{record['file']})" for record in records)
    each = ((record.get("git_commit") or "unknown").partition("-") for record in records)
    commits = dict.fromkeys(f"`{commit[:12]}{dash}{changed}`" for commit, dash, changed in each)
    machines = {}
    for record in records:
        triton = f", Triton {record['triton_version']}" if record.get("triton_version") else ""
        machines[f"{machine_name(record)}, PyTorch {record.get('torch_version')}{triton}"] = None
    return f"Record: {', '.join(files)}; commit {', '.join(commits)}; {'; '.join(machines)}."


def table(
    what: str, records: Sequence[Record], columns: Sequence[Column], file: str, rows: Iterable[Record] | None = None
) -> str:
    """A row per record, or those that are made of them, and where they come from; or that there are none."""
    shown = markdown(records if rows is None else rows, columns)
    return f"{shown}\n\n{source(records)}" if records else absent(what, file)


def absent(what: str, file: str) -> str:
    return f"{what}: {NONE} (no such record in `results/{file}`)."
