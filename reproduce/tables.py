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
from reproduce.helpers.columns import COLUMNS, NONE, TEXT, of, pivot, speedup_text
from reproduce.helpers.published import (
    SELF,
    draft_name,
    find_fact,
    is_acceptance_known,
    predict,
    published,
    published_speedups,
    target_name,
)
from reproduce.helpers.records import Record, grouped, read_records, rows_of
from reproduce.helpers.request_fields import request_fields
from reproduce.spec_bench import table_rows

RESULTS = ROOT / "reproduce" / "results"
DOCS = ("performance", "gpu", "long_texts", "trained_heads", "serving")
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in DOCS), ROOT / "reproduce" / "README.md")
Table = tuple[Sequence[Record], Sequence[Column]]
COST_NAMES = {"plain": "plain step", "verify": "verification", "draft": "draft step"}
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Flags:
    name: Positional[str | None] = None  # the table to print; without it, the pages are rewritten
    records: Positional[tuple[str, ...]] = ()  # files of records


class Source(NamedTuple):
    """A table, and its file in reproduce/results/ if it is made of records. is_last: shows the last record alone.
    cells: names of the records that it shows; all if none is named."""

    file: str | None
    table: Callable[[list[Record]], Table]
    is_last: bool = False
    cells: tuple[str, ...] = ()


def by_size(record: Record) -> tuple:
    who = target_name(record), draft_name(record) != SELF, draft_name(record)
    return *who, *(record.get(name) or 0 for name in ("prefix_len", "B", "gamma", "draft_budget"))


def published_beside(facts: Sequence[Record], text: Callable[[float], str]) -> Column:
    def cell(record: Record) -> str | None:
        fact = find_fact(facts, record)
        return None if fact is None else text(fact["value"])

    return Column(cell, "published", missing=NONE)


# Measured runs beside the published number of the same models and setting.
def speedups(records: list[Record]) -> Table:
    models = [Column(target_name, "target", **TEXT), Column(draft_name, "draft", **TEXT)]
    beside = published_beside(published_speedups(), "{:.2f}".format)
    columns = of(
        "prefix_len B gamma draft_budget speedup wall_speedup plain_ms verify_ratio draft_ratio plain_rate rate"
    )
    return sorted(records, key=by_size), [*models, *columns, beside]


def acceptance(records: list[Record]) -> Table:
    """Show acceptance by policy and text, with the published number of the same model and setting."""
    rows = [row | {"text": f"{row['text']}, {row['draft_policy']}"} for row in sorted(rows_of(records), key=by_size)]
    lines, columns = pivot(rows, of("prefix_len B draft_budget"), "text", COLUMNS["acceptance"])
    return lines, [*columns, published_beside(published()["acceptance"], "{:.2f}".format)]


# Published numbers beside predictions.
def prediction_text(fact: Record) -> str:
    """Show the published and the predicted number. ?: the acceptance is assumed. *: plain decoding is faster."""
    value, is_ratio = predict(fact), "kind" in fact
    texts = [f"{x:.2f}" if is_ratio else speedup_text(x) for x in (fact["value"], value)]
    return f"{texts[0]} / {texts[1]}" + ("" if is_ratio or is_acceptance_known(fact) else "?")


def published_table(facts: Sequence[Record], *more: Column) -> Table:
    models = [Column(target_name, "target", **TEXT), Column(draft_name, "draft", **TEXT)]
    return pivot(facts, [*more, *models, COLUMNS["prefix_len"]], "B", Column(prediction_text, ""))


def published_ratios(records: list[Record]) -> Table:
    def at(fact: Record) -> str:
        return f"verification, gamma {fact['gamma']}" if fact["gamma"] else f"draft step, budget {fact['draft_budget']}"

    return pivot(published()["ratios"], [Column(at, "over a plain step", **TEXT), COLUMNS["prefix_len"]], "B",
                 Column(prediction_text, ""))  # fmt: skip


# The cost model.
def cost_errors_table(records: list[Record]) -> Table:
    errors = [Column("runs", "runs"), Column("median_error", "median error", ".1%")]
    return cost_errors.errors_by_size(records), [
        *of("B prefix_len"),
        *errors,
        Column("largest_error", "largest", ".1%"),
    ]


def auto(records: list[Record]) -> Table:
    rows = []
    for way, name in ((cost_errors.AUTO, "gamma"), (cost_errors.AUTO_BUDGET, "gamma and budget")):
        rows += [row | {"chosen": name} for row in cost_errors.against_fixed(records, way)]
    heads = {"usual": "gamma 3", "best": "best fixed", "auto": "auto"}
    speeds = [Column(name, head, speedup_text) for name, head in heads.items()]
    ratios = [Column("mean_gamma", "mean gamma", ".1f"), Column("ratio", "auto / better", ".3f")]
    more = [Column("lowest", "lowest repeat", ".3f"), Column("repeats", "repeats")]
    return rows, [Column("chosen", "auto chooses", **TEXT), *of("B prefix_len"), *speeds, *ratios, *more]


# Costs and speedups on a CPU.
def cpu_storages(records: list[Record]) -> Table:
    """Show the greedy runs of each storage, and the speedups of the coupled ones."""
    lines = [record | record["rows"][0] for record in records]
    columns = of("storage draft_weights plain_ms verify_ratio draft_ratio plain_rate rate speedup wall_speedup")
    return lines, [*columns, Column(lambda row: row["rows"][-1].get("speedup"), "speedup, sampled", speedup_text)]


# Drafters and policies.
def prompt_sets(records: list[Record]) -> Table:
    def cell(row: Record) -> str:
        return f"{speedup_text(row['speedup'])} ({row['acceptance_rate']:.2f})"

    return pivot(table_rows(records), of("category sequences"), "drafter", Column(cell, ""))


# Speedup, and the mean accepted length behind it.
GAIN = Column(lambda row: f"{speedup_text(row['speedup'])} ({row['mean_accepted_length']:.2f})", "")


def drafters(records: list[Record]) -> Table:
    """Show the speedup and the mean accepted length of each drafter on each text that is decoded row by row."""
    names = {"default": "book", "reproduction/heads/held_back.txt": "its second half"}
    rows = []
    for row in rows_of(record for record in records if record["B"] == 1):
        text = f"{names.get(row['text'], Path(row['text']).stem)}, {row['prefix_len']}, T {row['temperature']:g}"
        rows.append(row | {"text": text, "drafter": re.sub(r":[^@]*", "", row["drafter"])})
    return pivot(rows, of("drafter"), "text", GAIN)


def lengths(records: list[Record], cell: Column = GAIN) -> Table:
    """Show each drafter by context: the medians of its runs."""
    rows = [row | {"drafter": re.sub(r":reproduction/[^@=]*", "", row["drafter"])} for row in rows_of(records)]
    figures = "speedup", "mean_accepted_length", "drafting_ms", "baseline_step_ms"
    runs = grouped(rows, itemgetter("temperature", "drafter", "prefix_len")).values()
    rows = [each[-1] | {name: median(row[name] for row in each) for name in figures} for each in runs]
    rows.sort(key=itemgetter("temperature"))
    return pivot(rows, of("temperature drafter"), "prefix_len", cell)


def lengths_drafting(records: list[Record]) -> Table:
    """Show the cost of a round's drafts in plain steps by context, for samples."""
    return lengths([record for record in records if record["temperature"]], COLUMNS["drafting_ratio"])


def policies_acceptance(records: list[Record]) -> Table:
    """Show the last row of each policy and text behind 7500 tokens at gamma 3."""
    runs = [record for record in records if "rows" in record and record["prefix_len"] == 7500 and record["gamma"] == 3]
    rows = [row for row in rows_of(runs) if row["draft_budget"] in (75, 375, 750, None)]
    rows.sort(key=lambda row: (row["draft_budget"] or 7500, row["draft_policy"]))
    return pivot(rows, of("draft_budget draft_policy"), "text", COLUMNS["acceptance"])


def policy_pairs(records: list[Record]) -> Table:
    rows = [row for row in rows_of(records) if row["verification"] == "coupled"]
    columns = of(
        "prefix_len B drafter draft_weights acceptance mean_accepted_length drafting_ratio speedup wall_speedup"
    )
    return rows, columns


def contexts(records: list[Record]) -> Table:
    """Show acceptance apart from the costs of a verification and of a round's drafts, by context and drafter."""
    rows = [record | {"drafter": record["draft_policy"] or record["draft"]} for record in records]
    rows.sort(key=lambda row: (row["config"]["target"].get("rope_scaling") or "", row["prefix_len"], row["drafter"]))
    rope = Column(lambda row: row["config"]["target"].get("rope_scaling"), "context extended", align="<")
    columns = of("prefix_len drafter acceptance mean_accepted_length plain_ms verify_ratio draft_ratio speedup")
    return rows, [rope, *columns]


def predictions(records: list[Record]) -> Table:
    """Show the first predicted size of each record."""
    rows = []
    for record in records:
        kinds = {"machine": record["predicted_for"], "acceptance": record["acceptance_rates_by_context"][0][0]}
        (plain, *_), *others = (record[f"predicted_{name}_ms"][0] for name in COST_NAMES)
        costs = dict(zip(COST_NAMES, (plain, *(each[0][0] for each in others)), strict=True))
        rows.append(record | record["best"][0] | kinds | costs)
    heads = [Column("machine", "machine", **TEXT), Column("model", "model", **TEXT)]
    costs = [Column(name, f"{head}, ms", ".1f") for name, head in COST_NAMES.items()]
    columns = [*of("B prefix_len draft_policy draft_budget gamma"), Column("acceptance", "acceptance assumed", ".2f")]
    return rows, [*heads, *columns, *costs, Column("predicted_speedup", "speedup", ".2f")]


def long_generations(records: list[Record]) -> Table:
    """Show how each policy fares by the number of tokens generated; no times of passes that others disturbed."""
    rows = [record | row for record in records for row in record["by_length"]]
    for row in rows:
        if row["contention"]["baseline"]["contended"] or row["contention"]["speculation"]["contended"]:
            row |= dict.fromkeys(("baseline_step_ms", "round_ms", "speedup"))
    generated = Column(lambda row: "{} to {}".format(*row["generated"]), "generated tokens", align="<")
    costs = [Column(name, head, ".1f") for name, head in (("round_ms", "round, ms"), ("draft_ms", "drafts, ms"))]
    columns = [*of("draft_policy"), generated, Column("acceptance_rate", "acceptance", ".3f")]
    columns += [*of("mean_accepted_length plain_ms"), *costs, Column("verify_ms", "verification, ms", ".1f")]
    columns += of("speedup")
    return rows, [column for column in columns if {column.cell(row) for row in rows} != {column.missing}]


def serving(records: list[Record]) -> Table:
    """Show each load with speculation or at another server beside plain rounds of the same requests."""
    rows = []
    for record in records:
        for n_clients, modes in grouped(record["rows"], lambda row: row["clients"]).items():
            plain, *others = (record | row for row in modes)
            same = {"plain_ttft": plain["ttft_ms_p50"], "plain_tpot": plain["tpot_ms_p50"]}
            rows += [row | same | {"clients": n_clients} for row in others]
    columns = [Column("{shortest} to {longest}".format_map, "prompt tokens"), *of("temperature")]
    columns += [Column("turns", "turns"), Column("clients", "clients"), Column("mode", "server", **TEXT)]
    columns += [Column("output_tokens_per_second", "tok/s", ".1f"), Column("speedup", "over plain", speedup_text)]
    columns += [Column("decode_speedup", "rounds alone", speedup_text), Column("accepted_share", "accepted", ".2f")]
    for name, head in (("ttft", "first token"), ("tpot", "per token")):
        columns += [Column(f"{name}_ms_p50", f"{head}, ms", ".0f"), Column(f"plain_{name}", "plain", ".0f")]
    return rows, columns


def round_costs(records: list[Record]) -> Table:
    rows = [row for row in records[-1]["rounds"] if row["mode"] == "coupled"]
    heads = {"policy": "policy", "nodes_to_choose": "nodes a layer to choose", "nodes_a_layer": "nodes a layer"}
    heads |= {"nodes": "nodes", "weights_gb": "weights, GB", "attention_gb": "attention, GB"}
    heads |= {"layers_gb": "else in layers, GB", "outside_gb": "outside, GB"}
    return rows, [Column(name, head, ".1f" if "GB" in head else "") for name, head in heads.items()]


def gpu_speedups(records: list[Record]) -> Table:
    rows, [target, draft, *columns, _] = speedups(records)
    return rows, [target, draft, *of("temperature"), *columns]


def gpu_attention(records: list[Record]) -> Table:
    """Show the rate at which each kernel reads entries."""
    rates = []
    for record in records:
        scored, copy = ", scores written" * (record["cell"] == "notes"), record["copy_tb_per_s"]
        rates += [{"what": what + scored, "rate": copy / n} for what, n in record["times_copy"].items()]
    return rates, [Column("what", "attention of a layer", **TEXT), Column("rate", "TB/s", ".2f")]


def gpu_linears(records: list[Record]) -> Table:
    """Show the ms of the linear layers of a transformer layer by storage and rows."""
    names = {"plain": "bfloat16", "int8": "int8", "int4": "int4"}
    rows = [{"n": n, **{name: records[-1][f"{name}_ms_{n}"] for name in names}} for n in (16, 64, 128, 256)]
    return rows, [Column("n", "tokens"), *(Column(name, f"{head}, ms", ".2f") for name, head in names.items())]


def roofline(records: list[Record]) -> Table:
    """Show the errors of predicted speedups, separately for published and assumed acceptance."""
    errors: dict[str, list[float]] = {"acceptance published": [], "acceptance assumed": []}
    for fact in published_speedups():
        group = "acceptance published" if is_acceptance_known(fact) else "acceptance assumed"
        errors[group].append(abs(predict(fact) / fact["value"] - 1))
    rows = [
        {"group": name, "n": len(each), "median": median(each), "largest": max(each)} for name, each in errors.items()
    ]
    heads = [Column("group", "published speedups", **TEXT), Column("n", "number")]
    return rows, [*heads, Column("median", "median error", ".1%"), Column("largest", "largest", ".1%")]


# What the server takes.
TABLES = {
    "speedups": Source("speedups.jsonl", speedups),
    "acceptance": Source("acceptance.jsonl", acceptance),
    "published_machines": Source(
        None, lambda _: published_table(published()["speedup_tables"], Column("origin", "GPUs", **TEXT))
    ),
    "published_figure_6": Source(None, lambda _: published_table(published()["figure_6"])),
    "published_ratios": Source(None, published_ratios),
    "roofline": Source(None, roofline),
    "cost_errors": Source("cost_model.jsonl", cost_errors_table),
    "auto": Source("cost_model.jsonl", auto),
    "cpu_storages": Source("cpu_storages.jsonl", cpu_storages),
    "prompt_sets": Source("spec_bench.jsonl", prompt_sets),
    "drafters": Source("drafters.jsonl", drafters),
    "policies": Source("policies.jsonl", policies_acceptance),
    "policy_pairs": Source("policy_pairs.jsonl", policy_pairs),
    "contexts": Source("contexts.jsonl", contexts),
    "lengths": Source("lengths.jsonl", lengths),
    "lengths_drafting": Source("lengths.jsonl", lengths_drafting),
    "predictions": Source("cost_prediction.jsonl", predictions),
    "long_generations": Source("long_generations.jsonl", long_generations),
    "serving": Source("serve_load.jsonl", serving),
    "gpu_speedups": Source("gpu_speedups.jsonl", gpu_speedups),
    "gpu_attention": Source("gpu.jsonl", gpu_attention, cells=("bandwidth triton", "notes")),
    "gpu_linears": Source("gpu.jsonl", gpu_linears, cells=("linears",)),
    "round_costs": Source("round_costs.jsonl", round_costs, is_last=True),
    "parameters": Source(None, lambda _: request_fields()),
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
        file, table, is_last, cells = TABLES[place[2]]
        records = read_records(RESULTS / file) if file else []
        records = [record for record in records if not cells or record["cell"] in cells][-1 if is_last else 0 :]
        source = f"{provenance_line(records, file, page)}\n\n" if file else ""
        return f"{place[1]}{source}{markdown(*table(records))}\n{place[3]}"

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
    print(console(*TABLES[flags.name].table(records)))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
