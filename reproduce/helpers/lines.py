"""Lines of tables that a `where`, a `sort` or a `median` of tables.toml cannot say, from records."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import Any

from bench.auto.costs import tokens_per_round
from cost_model.report import costs_of
from reproduce.helpers.contenders import summary_rows
from reproduce.helpers.published import is_acceptance_known, predict, published, published_speedups
from reproduce.helpers.records import Record, grouped


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
    """Show the errors of the speedups that are predicted from costs, for each number of rows and context."""
    compared = predicted_runs(records)
    by_size = sorted(grouped(compared, itemgetter("B", "prefix_len")).items())
    lines = [of_errors([row["error"] for row in rows], B=n, prefix_len=context) for (n, context), rows in by_size]
    return [*lines, of_errors([row["error"] for row in compared], B="all")] if lines else []


def predicted_runs(records: Sequence[Record]) -> list[Record]:
    """Return every fixed (rows, context, budget, gamma) whose costs are known, with the `error` of the prediction.

    Costs are those that `auto budget` measured before each of its runs: the median of the predicted speedups counts.
    The acceptance rate is that of the run that a prediction is compared with."""
    found = []
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
                found.append(run | row | {"error": predicted / row["speedup"] - 1})
    return found


LINES: dict[str, Callable[[list[Record]], Sequence[Record]]] = {
    **{line.__name__: line for line in (cpu_storages, predictions, serving, gpu_attention, gpu_linears)},
    **{line.__name__: line for line in (roofline, cost_errors, summary_rows)},
    "published_machines": lambda _: published()["speedup_tables"],
    "published_figure_6": lambda _: published()["figure_6"],
    "published_ratios": lambda _: published()["ratios"],
}
