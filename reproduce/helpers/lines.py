"""Lines of the tables of tables.toml, from records."""

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import median

from reproduce.helpers import cost_errors
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
from reproduce.helpers.records import Record, grouped, rows_of
from reproduce.helpers.request_fields import request_fields


def _rank(value: int | str) -> tuple[bool, int | str]:
    """Return a key that sorts words such as `auto` after numbers."""
    return isinstance(value, str), value


def by_size(records: list[Record]) -> list[Record]:
    def size(record: Record) -> tuple:
        who = target_name(record), draft_name(record) != SELF, draft_name(record)
        return *who, *(_rank(record.get(name) or 0) for name in ("prefix_len", "B", "gamma", "draft_budget"))

    return sorted(rows_of(records), key=size)


def acceptance(records: list[Record]) -> list[Record]:
    return [row | {"text": f"{row['text']}, {row['draft_policy']}"} for row in by_size(records)]


def auto(records: list[Record]) -> list[Record]:
    ways = (cost_errors.AUTO, "gamma"), (cost_errors.AUTO_BUDGET, "gamma and budget")
    return [row | {"chosen": name} for way, name in ways for row in cost_errors.against_fixed(records, way)]


def cpu_storages(records: list[Record]) -> list[Record]:
    """Show the greedy runs of each storage, and the speedups of the sampled ones."""
    return [record | record["rows"][0] | {"speedup_sampled": record["rows"][-1].get("speedup")} for record in records]


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
    rows = [
        record
        | {"drafter": record["draft_policy"] or record["draft"]}
        | {"rope_scaling": record["config"]["target"].get("rope_scaling")}
        for record in records
    ]
    return sorted(rows, key=lambda row: (row["rope_scaling"] or "", row["prefix_len"], row["drafter"]))


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


LINES: dict[str, Callable[[list[Record]], Sequence[Record]]] = {
    **{line.__name__: line for line in (rows_of, by_size, acceptance, auto, cpu_storages, summary_rows, lengths)},
    **{line.__name__: line for line in (sampled_lengths, policies, policy_pairs, contexts, predictions, serving)},
    **{line.__name__: line for line in (long_generations, round_costs, gpu_attention, gpu_linears, roofline)},
    "errors_by_size": cost_errors.errors_by_size,
    "published_machines": lambda _: published()["speedup_tables"],
    "published_figure_6": lambda _: published()["figure_6"],
    "published_ratios": lambda _: published()["ratios"],
    "parameters": lambda _: request_fields(),
}
