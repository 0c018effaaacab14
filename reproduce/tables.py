"""Write the tables of the documentation from records, or print a table of other records.

    python -m reproduce.tables                                      # rewrites the tables on the pages
    python -m reproduce.tables speedups reproduction/speedups.jsonl    # prints the table of that name

A page has the marks `<!-- table NAME -->` and `<!-- end -->`. The text between them is made of the records in
reproduce/results/, and the rest of the page is written by hand.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tyro.conf import Positional

from common import cli
from common.checkout import ROOT
from common.errors import ConfigError, DataError
from common.tables import Column, console, markdown
from reproduce.helpers import cost_errors
from reproduce.helpers.columns import of, pivot
from reproduce.helpers.contenders import summary_rows
from reproduce.helpers.published import (
    SELF,
    draft_name,
    is_acceptance_known,
    predict,
    published,
    published_speedups,
    target_name,
)
from reproduce.helpers.records import Record, grouped, read_records, rows_of
from reproduce.helpers.request_fields import request_fields

RESULTS = ROOT / "reproduce" / "results"
DOCS = ("performance", "gpu", "long_texts", "trained_heads", "serving")
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in DOCS), ROOT / "reproduce" / "README.md")
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Flags:
    name: Positional[str | None] = None  # the table to print; without it, the pages are rewritten
    records: Positional[tuple[str, ...]] = ()  # files of records


class Table(NamedTuple):
    """A table. columns: names of helpers/columns.py. file: of records in reproduce/results/. rows: makes the lines from
    the records. pivot: a field whose values are columns, too, and the column that these show. is_last: shows the last
    record alone. cells: the cells of the records that it shows; all if none is named."""

    columns: str
    file: str | None = None
    rows: Callable[[list[Record]], Sequence[Record]] = rows_of
    pivot: tuple[str, str] | None = None
    is_last: bool = False
    cells: tuple[str, ...] = ()

    def made(self, records: list[Record]) -> tuple[Sequence[Record], Sequence[Column]]:
        """Return the lines and the columns."""
        rows = self.rows(records)
        return pivot(rows, self.columns, *self.pivot) if self.pivot else (rows, of(self.columns))


def by_size(records: list[Record]) -> list[Record]:
    def size(record: Record) -> tuple:
        who = target_name(record), draft_name(record) != SELF, draft_name(record)
        return *who, *(record.get(name) or 0 for name in ("prefix_len", "B", "gamma", "draft_budget"))

    return sorted(rows_of(records), key=size)


def acceptance(records: list[Record]) -> list[Record]:
    return [row | {"text": f"{row['text']}, {row['draft_policy']}"} for row in by_size(records)]


def auto(records: list[Record]) -> list[Record]:
    ways = (cost_errors.AUTO, "gamma"), (cost_errors.AUTO_BUDGET, "gamma and budget")
    return [row | {"chosen": name} for way, name in ways for row in cost_errors.against_fixed(records, way)]


def cpu_storages(records: list[Record]) -> list[Record]:
    """Show the greedy runs of each storage, and the speedups of the sampled ones."""
    return [record | record["rows"][0] for record in records]


def lengths(records: list[Record]) -> list[Record]:
    """Show each drafter by context: the medians of its runs."""
    rows = [row | {"drafter": re.sub(r":reproduction/[^@=]*", "", row["drafter"])} for row in rows_of(records)]
    figures = "speedup", "mean_accepted_length", "drafting_ms", "baseline_step_ms"
    runs = grouped(rows, itemgetter("temperature", "drafter", "prefix_len")).values()
    rows = [each[-1] | {name: median(row[name] for row in each) for name in figures} for each in runs]
    return sorted(rows, key=itemgetter("temperature"))


def sampled_lengths(records: list[Record]) -> list[Record]:
    return lengths([record for record in records if record["temperature"]])


def policies(records: list[Record]) -> list[Record]:
    """Show the last row of each policy and text after 7500 tokens at gamma 3."""
    runs = [record for record in records if "rows" in record and record["prefix_len"] == 7500]
    rows = [row for row in rows_of(runs) if row["gamma"] == 3 and row["draft_budget"] in (75, 375, 750, None)]
    return sorted(rows, key=lambda row: (row["draft_budget"] or 7500, row["draft_policy"]))


def policy_pairs(records: list[Record]) -> list[Record]:
    return [row for row in rows_of(records) if row["verification"] == "coupled"]


def contexts(records: list[Record]) -> list[Record]:
    rows = [record | {"drafter": record["draft_policy"] or record["draft"]} for record in records]
    return sorted(
        rows, key=lambda row: (row["config"]["target"].get("rope_scaling") or "", row["prefix_len"], row["drafter"])
    )


def predictions(records: list[Record]) -> list[Record]:
    """Show the first predicted size of each record."""
    rows = []
    for record in records:
        kinds = {"machine": record["predicted_for"], "assumed": record["acceptance_rates_by_context"][0][0]}
        plain, verify, draft = (record[f"predicted_{name}_ms"][0][0] for name in ("plain", "verify", "draft"))
        rows.append(record | record["best"][0] | kinds | {"plain": plain, "verify": verify[0], "draft_step": draft[0]})
    return rows


def long_generations(records: list[Record]) -> list[Record]:
    """Show how each policy fares by the number of tokens generated; no times of passes that others disturbed."""
    rows = [record | row for record in records for row in record["by_length"]]
    for row in rows:
        if row["contention"]["baseline"]["contended"] or row["contention"]["speculation"]["contended"]:
            row |= dict.fromkeys(("baseline_step_ms", "round_ms", "speedup"))
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


def round_costs(records: list[Record]) -> list[Record]:
    return [row for row in records[-1]["rounds"] if row["mode"] == "coupled"]


def gpu_attention(records: list[Record]) -> list[Record]:
    """Show the rate at which each kernel reads entries."""
    return [
        {"what": what + ", scores written" * (record["cell"] == "notes"), "rate": record["copy_tb_per_s"] / n}
        for record in records
        for what, n in record["times_copy"].items()
    ]


def gpu_linears(records: list[Record]) -> list[Record]:
    """Show the ms of the linear layers of a transformer layer by storage and rows."""
    names = ("plain_ms", "int8_ms", "int4_ms")
    return [{"n": n, **{name: records[-1][f"{name}_{n}"] for name in names}} for n in (16, 64, 128, 256)]


def roofline(records: list[Record]) -> list[Record]:
    """Show the errors of predicted speedups, separately for published and assumed acceptance."""
    rows = []
    for is_known, name in ((True, "acceptance published"), (False, "acceptance assumed")):
        facts = [fact for fact in published_speedups() if is_acceptance_known(fact) == is_known]
        errors = [abs(predict(fact) / fact["value"] - 1) for fact in facts]
        rows.append(
            {"group": name, "number": len(errors), "median_error": median(errors), "largest_error": max(errors)}
        )
    return rows


COSTS = "baseline_step_ms verify_ratio draft_ratio"
SPEEDS = f"speedup wall_speedup {COSTS} baseline_tokens_per_second decode_tokens_per_second"
TABLES = {
    "speedups": Table(
        f"target draft prefix_len B gamma draft_budget {SPEEDS} published_speedup", "speedups.jsonl", by_size
    ),
    "acceptance": Table(
        "prefix_len B draft_budget * published_acceptance", "acceptance.jsonl", acceptance, ("text", "acceptance")
    ),
    "published_machines": Table(
        "origin target draft prefix_len *", None, lambda _: published()["speedup_tables"], ("B", "prediction")
    ),
    "published_figure_6": Table(
        "target draft prefix_len *", None, lambda _: published()["figure_6"], ("B", "prediction")
    ),
    "published_ratios": Table("ratio prefix_len *", None, lambda _: published()["ratios"], ("B", "prediction")),
    "roofline": Table("group number median_error largest_error", None, roofline),
    "cost_errors": Table(
        "B prefix_len runs median_error largest_error", "cost_model.jsonl", cost_errors.errors_by_size
    ),
    "auto": Table(
        "chosen B prefix_len usual best auto mean_gamma ratio_to_better lowest repeats", "cost_model.jsonl", auto
    ),
    "cpu_storages": Table(
        f"storage draft_weights {COSTS} baseline_tokens_per_second decode_tokens_per_second speedup wall_speedup "
        "speedup_sampled",
        "cpu_storages.jsonl",
        cpu_storages,
    ),
    "prompt_sets": Table("category sequences *", "spec_bench.jsonl", summary_rows, ("drafter", "gain_by_acceptance")),
    "policies": Table("draft_budget draft_policy *", "policies.jsonl", policies, ("text", "acceptance")),
    "policy_pairs": Table(
        "prefix_len B drafter draft_weights acceptance mean_accepted_length drafting_ratio speedup wall_speedup",
        "policy_pairs.jsonl",
        policy_pairs,
    ),
    "contexts": Table(
        f"rope_scaling prefix_len drafter acceptance mean_accepted_length {COSTS} speedup", "contexts.jsonl", contexts
    ),
    "lengths": Table("temperature drafter *", "lengths.jsonl", lengths, ("prefix_len", "gain")),
    "lengths_drafting": Table(
        "temperature drafter *", "lengths.jsonl", sampled_lengths, ("prefix_len", "drafting_ratio")
    ),
    "predictions": Table(
        "machine model B prefix_len draft_policy draft_budget gamma assumed plain verify draft_step predicted_speedup",
        "cost_prediction.jsonl",
        predictions,
    ),
    "long_generations": Table(
        "draft_policy generated acceptance_rate mean_accepted_length baseline_step_ms round_ms draft_ms verify_ms "
        "speedup",
        "long_generations.jsonl",
        long_generations,
    ),
    "serving": Table(
        "prompt_tokens_range temperature turns clients mode output_tokens_per_second over_plain decode_speedup "
        "accepted_share ttft_ms_p50 plain_ttft tpot_ms_p50 plain_tpot",
        "serve_load.jsonl",
        serving,
    ),
    "gpu_speedups": Table(
        f"target draft temperature prefix_len B gamma draft_budget {SPEEDS}", "gpu_speedups.jsonl", by_size
    ),
    "gpu_attention": Table("what rate", "gpu.jsonl", gpu_attention, cells=("bandwidth triton", "notes")),
    "gpu_linears": Table("n plain_ms int8_ms int4_ms", "gpu.jsonl", gpu_linears, cells=("linears",)),
    "round_costs": Table(
        "policy nodes_to_choose nodes_a_layer nodes weights_gb attention_gb layers_gb outside_gb",
        "round_costs.jsonl",
        round_costs,
        is_last=True,
    ),
    "parameters": Table("field completions chats text-generation-inference about", None, lambda _: request_fields()),
}


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
        table = TABLES[place[2]]
        records = read_records(RESULTS / table.file) if table.file else []
        shown = [record for record in records if not table.cells or record["cell"] in table.cells]
        shown = shown[-1 if table.is_last else 0 :]
        source = f"{provenance_line(shown, table.file, page)}\n\n" if table.file else ""
        return f"{place[1]}{source}{markdown(*table.made(shown))}\n{place[3]}"

    return PLACE.sub(make, page.read_text(encoding="utf-8"))


def main(flags: Flags) -> None:
    if flags.name is None:
        for page in PAGES:
            page.write_text(filled(page), encoding="utf-8")
            print(f"wrote {page}")
        return
    if flags.name not in TABLES:
        raise ConfigError("there is no such table", "NAME", flags.name, ", ".join(TABLES), "choose among these")
    records = [record for path in flags.records for record in read_records(path)]
    if not records and TABLES[flags.name].file:
        raise DataError("there are no records", "RECORDS", " ".join(flags.records), "a file of records", "name a file")
    print(console(*TABLES[flags.name].made(records)))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
