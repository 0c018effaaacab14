"""Write the tables of the documentation from records, or print a table of other records.

    python -m reproduce.tables                                      # rewrites the tables on the pages
    python -m reproduce.tables speedups reproduction/speedups.jsonl    # prints the table of that name
    python -m reproduce.tables policies reproduction/policies.jsonl --where prefix_len=4000 text=book,sampled

A page has the marks `<!-- table NAME -->` and `<!-- end -->`. The text between them is made of the records in
reproduce/results/ as reproduce/tables.toml says, and the rest of the page is written by hand.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tyro.conf import Positional

import bench
from bench.auto.costs import tokens_per_round
from common import cli
from common.checkout import ROOT
from common.errors import DataError, refuse
from common.say import say
from common.tables import Column, console, markdown
from cost_model.report import costs_of
from reproduce.helpers.columns import PIVOT, SPECIFICATIONS, medians, of, pivot, ranked, shown
from reproduce.helpers.contenders import summary_rows
from reproduce.helpers.pairs import with_differences
from reproduce.helpers.published import is_acceptance_known, predict, published, published_speedups
from reproduce.helpers.records import SETTINGS, Record, grouped, read_records, refuse_name, rows_of, selected, varying

RESULTS = ROOT / "reproduce" / "results"
DOCS = ("performance", "gpu", "long_texts", "trained_heads")
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in DOCS), ROOT / "reproduce" / "README.md")
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIVEN = SPECIFICATIONS["tables"]
TABLES = {name: GIVEN.get(each.get("like"), {}) | each for name, each in GIVEN.items()}


@dataclass(frozen=True)
class Flags:
    name: Positional[str | None] = None  # the table to print; without it, the pages are rewritten
    records: Positional[tuple[str, ...]] = ()  # files of records
    where: tuple[str, ...] | None = None  # NAME=V1,V2: rows to show, in the place of the table's choice


def cpu_storages(records: list[Record]) -> list[Record]:
    """Show the greedy runs of each storage, and the speedups of the sampled ones."""
    return [record | record["rows"][0] | {"speedup_sampled": record["rows"][-1].get("speedup")} for record in records]


def predictions(records: list[Record]) -> list[Record]:
    """Show the first predicted size of each record."""
    rows = []
    for record in records:
        row = record["rows"][0]
        ms = {"plain": row["predicted_plain_ms"], "draft_step": row["predicted_draft_ms"]}
        ms |= {"verify": row["predicted_verify_ms"][0], "assumed": row["acceptance_rate"]}
        rows.append(record | record["best"][0] | ms | {"machine": record["predicted_for"]})
    return rows


def serving(records: list[Record]) -> list[Record]:
    """Show each load with speculation or at another server next to plain rounds of the same requests."""
    rows = []
    for record in records:
        for n_clients, modes in grouped(record["rows"], lambda row: row["clients"]).items():
            plain, *others = (record | row for row in modes)
            same = {"plain_ttft": plain["ttft_ms_p50"], "plain_tpot": plain["tpot_ms_p50"]}
            rows += [row | same | {"clients": n_clients} for row in others]
    return rows


def gpu_attention(records: list[Record]) -> list[Record]:
    """Show the rate at which each kernel of Triton reads entries."""
    return [
        {"what": what + ", scores written" * (record["cell"] == "notes"), "rate": record["copy_tb_per_s"] / n}
        for record in records
        if record.get("cell") in ("bandwidth triton", "notes")
        for what, n in record["times_copy"].items()
    ]


def gpu_linears(records: list[Record]) -> list[Record]:
    """Show the ms of the linear layers of a transformer layer by storage and rows."""
    names = ("plain_ms", "int8_ms", "int4_ms")
    measured = [record for record in records if record.get("cell") == "linears"]
    return [{"n": n, **{name: x[f"{name}_{n}"] for name in names}} for x in measured[-1:] for n in (16, 64, 128, 256)]


def of_errors(errors: Sequence[float], **group: Any) -> Record:
    """Return a line of the relative errors of a group of predictions."""
    sizes = [*map(abs, errors)]
    return group | {"number": len(sizes), "median_error": median(sizes), "largest_error": max(sizes)}


def roofline(records: list[Record]) -> list[Record]:
    """Show the errors of predicted speedups, separately for published and assumed acceptance."""
    groups = grouped(published_speedups(), is_acceptance_known)
    names = {True: "acceptance published", False: "acceptance assumed"}
    return [
        of_errors([predict(fact) / fact["value"] - 1 for fact in groups[is_known]], group=name)
        for is_known, name in names.items()
    ]


def cost_errors(records: list[Record]) -> list[Record]:
    """Show the errors of the speedups that are predicted from costs, for each number of rows and context.

    A prediction is of a fixed (rows, context, budget, gamma) by costs that `auto budget` measured before each of its
    runs, of which the median counts, with the acceptance rate of the run that it is compared with."""
    by_size: dict[tuple[int, int], list[float]] = {}
    for run in records:
        measured = [row["measured_costs"] for row in run["rows"] if row["draft_budget"] == "auto"]
        for row in (row for row in run["rows"] if isinstance(row["gamma"], int) and row["gamma"] > 0):
            gamma, alpha, budget = row["gamma"], row["acceptance_rate"], row["draft_budget"]
            costs = [
                costs_of(cost)
                for cost in chain(*chain(*measured))
                # Older costs do not say of how many rows they are.
                if cost["draft_budget"] == budget and cost.get("rows", run["B"]) == run["B"]
            ]
            if alpha is not None and costs:
                predicted = median(cost.speedup(tokens_per_round(alpha, gamma), gamma) for cost in costs)
                by_size.setdefault((run["B"], run["prefix_len"]), []).append(predicted / row["speedup"] - 1)
    lines = [of_errors(errors, B=n, prefix_len=context) for (n, context), errors in sorted(by_size.items())]
    return [*lines, of_errors([*chain(*by_size.values())], B="all")] if lines else []


# Lines that a `where`, a `sort` or a `median` of tables.toml cannot say, from records.
LINES: dict[str, Callable[[list[Record]], Sequence[Record]]] = {
    **{line.__name__: line for line in (cpu_storages, predictions, serving, gpu_attention, gpu_linears)},
    **{line.__name__: line for line in (roofline, cost_errors, summary_rows)},
    "published_machines": lambda _: published()["speedup_tables"],
    "published_figure_6": lambda _: published()["figure_6"],
    "published_ratios": lambda _: published()["ratios"],
}


def made(
    name: str, records: list[Record], where: Sequence[str] | None = None, *, is_whole: bool = False
) -> tuple[Sequence[Record], Sequence[Column]]:
    """Return the lines and the columns of a table. where: conditions in the place of the table's. is_whole: begin with
    the settings by which lines differ whose labels in the table are equal. Errors: DataError for records without a
    column that a pivot needs, or without half of another table's columns."""
    table = TABLES[name]
    names, by = table["columns"], table.get("by")
    needed = (names.replace(PIVOT, f"{by} {table['cell']}") if by else names).split()
    try:
        rows = LINES[table["lines"]](records) if "lines" in table else rows_of(records, table.get("each", "rows"))
        chosen = (table.get("where", ()), f" of the table {name}") if where is None else (where,)
        rows = selected(rows, *chosen)
        named, known = table.get("median", " ".join(needed)).split(), SPECIFICATIONS["columns"]
        labels = of(" ".join(name for name in named if name in SETTINGS or "text" in known.get(name, ())))
        labelled = [row | {"label": [column.cell(row) for column in labels]} for row in rows]
        more = "".join(f"{setting} " for setting in varying(labelled, "label") if is_whole)
        if "median" in table:
            rows = medians(rows, more + table["median"])
        if "against" in table:
            rows = with_differences(rows, table["against"])
        rows = ranked(rows, table.get("sort", ""))
        lacking = [each for each in needed if not shown(of(each), rows)]
        if lacking and (by or len(lacking) >= len(needed) / 2):
            raise KeyError(*lacking)
    except KeyError as error:
        required, fix = f"records with the columns of {name}", "name records of the command that its page gives"
        seen = f"no {', no '.join(map(str, error.args))}"
        refuse(f"the table {name}", seen, required, "the records lack columns", fix, DataError)
    names = more + names
    return pivot(rows, names, by, table["cell"]) if by else (rows, of(names))


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
        if place[2] not in TABLES:
            refuse_name(page, place[2], [*TABLES], "there is no such table")
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
        refuse_name("the command line", flags.name, [*TABLES], "there is no such table")
    records = [record for path in flags.records for record in read_records(path)]
    if not records and "file" in TABLES[flags.name]:
        what, fix = "the table has no records", "name a file after the table"
        refuse("the command line", "no file", "a file of records", what, fix, DataError)
    is_setting = TABLES[flags.name].get("each") != "best"  # a best draft is a result
    rows, columns = made(flags.name, records, flags.where, is_whole=is_setting)
    print(table := console(rows, columns), *bench.legend(table), sep="\n")
    if flags.where is None and (usual := TABLES[flags.name].get("where")):
        say(f"note: rows of {' '.join(usual)} alone, unless --where says others")
    if lacking := [column.head for column in columns if column not in shown(columns, rows)]:
        say(f"note: no record has: {'; '.join(lacking)}")


if __name__ == "__main__":
    cli.run(main, Flags)
