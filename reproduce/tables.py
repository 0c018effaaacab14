"""Write the tables of the documentation from records, or print a table of other records.

    python -m reproduce.tables                                      # rewrites the tables on the pages
    python -m reproduce.tables speedups reproduction/speedups.jsonl    # prints the table of that name
    python -m reproduce.tables policies reproduction/policies.jsonl --where prefix_len=4000 text=book,sampled

A page has the marks `<!-- table NAME -->` and `<!-- end -->`. The text between them is made of the records in
reproduce/results/ as reproduce/tables.toml says, and the rest of the page is written by hand.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from common import cli
from common.checkout import ROOT
from common.errors import DataError, refuse
from common.say import say
from common.tables import Column, console, markdown
from reproduce.helpers.columns import SPECIFICATIONS, medians, of, pivot, ranked, shown
from reproduce.helpers.lines import LINES
from reproduce.helpers.pairs import with_differences
from reproduce.helpers.records import Record, read_records, rows_of, selected

RESULTS = ROOT / "reproduce" / "results"
DOCS = ("performance", "gpu", "long_texts", "trained_heads")
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in DOCS), ROOT / "reproduce" / "README.md")
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = SPECIFICATIONS["tables"]


@dataclass(frozen=True)
class Flags:
    name: Positional[str | None] = None  # the table to print; without it, the pages are rewritten
    records: Positional[tuple[str, ...]] = ()  # files of records
    where: tuple[str, ...] | None = None  # NAME=V1,V2: rows to show, in the place of the table's choice


def made(
    name: str, records: list[Record], where: Sequence[str] | None = None
) -> tuple[Sequence[Record], Sequence[Column]]:
    """Return the lines and the columns of a table. where: conditions in the place of the table's."""
    table = TABLES[name]
    rows = LINES[table["lines"]](records) if "lines" in table else rows_of(records, table.get("each", "rows"))
    rows = selected(rows, table.get("where", ()) if where is None else where)
    if "median" in table:
        rows = medians(rows, table["median"])
    if "against" in table:
        rows = with_differences(rows, table["against"])
    rows, names = ranked(rows, table.get("sort", "")), table["columns"]
    return pivot(rows, names, table["by"], table["cell"]) if "by" in table else (rows, of(names))


def provenance_line(records: Sequence[Record], file: str, page: Path) -> str:
    """Return a sentence that names the file, the commits and the machines of records."""
    path = "../reproduce/results" if page.parent.name == "docs" else "results"
    named = (str(record.get("git_commit")).partition("-") for record in records)
    commits = dict.fromkeys(f"`{commit[:12]}{''.join(more)}`" for commit, *more in named)
    machines = dict.fromkeys(
        f"; {record.get('gpu') or record['machine']}, PyTorch {record['torch_version']}"
        for record in records
        if "machine" in record  # nothing was measured for a prediction
    )
    return f"Record: [{file}]({path}/{file}); commit {', '.join(commits)}{''.join(machines)}."


def filled(page: Path) -> str:
    """Return the page's text with its tables made anew."""

    def make(place: re.Match) -> str:
        table, records = TABLES[place[2]], list[Record]()
        if file := table.get("file"):
            records = selected(read_records(RESULTS / file), table.get("records", ()))
        source = f"{provenance_line(records, file, page)}\n\n" if file else ""
        rows, columns = made(place[2], records)
        return f"{place[1]}{source}{markdown(rows, shown(columns, rows))}\n{place[3]}"

    return PLACE.sub(make, page.read_text(encoding="utf-8"))


def main(flags: Flags) -> None:
    if flags.name is None:
        for page in PAGES:
            page.write_text(filled(page), encoding="utf-8")
            print(f"wrote {page}")
        return
    if flags.name not in TABLES:
        refuse("NAME", flags.name, ", ".join(TABLES), "there is no such table", "choose among these")
    records = [record for path in flags.records for record in read_records(path)]
    if not records and "file" in TABLES[flags.name]:
        what, fix = "the table has no records", "name a file after the table"
        refuse("the command line", "no file", "a file of records", what, fix, DataError)
    try:
        rows, columns = made(flags.name, records, flags.where)
    except KeyError as error:
        required, fix = f"records with the columns of {flags.name}", "name records of the command that its page gives"
        refuse(", ".join(flags.records), f"no column {error}", required, "a record lacks a column", fix, DataError)
    print(console(rows, columns))
    if lacking := [column.head for column in columns if column not in shown(columns, rows)]:
        say(f"note: no record has: {'; '.join(lacking)}")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
