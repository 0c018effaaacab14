"""Lines of tables that a `where`, a `sort` or a `median` of tables.toml cannot say, from records."""

from collections.abc import Callable, Sequence
from statistics import median

from reproduce.helpers import cost_errors
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
        kinds = {"machine": record["predicted_for"], "assumed": record["acceptance_rates_by_context"][0][0]}
        plain, verify, draft = (record[f"predicted_{name}_ms"][0][0] for name in ("plain", "verify", "draft"))
        rows.append(record | record["best"][0] | kinds | {"plain": plain, "verify": verify[0], "draft_step": draft[0]})
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
    **{line.__name__: line for line in (cpu_storages, predictions, serving, gpu_attention, gpu_linears)},
    "roofline": roofline,
    "summary_rows": summary_rows,
    "errors_by_size": cost_errors.errors_by_size,
    "published_machines": lambda _: published()["speedup_tables"],
    "published_figure_6": lambda _: published()["figure_6"],
    "published_ratios": lambda _: published()["ratios"],
}
