"""Tables of Foretoken's own measurements: speedups, costs, throughput against latency, acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.bench.cost_tables import cost_table
from reproduce import acceptance_by_budget, acceptance_by_context, cost_model_error, cost_ratios, speedup_tables
from reproduce import throughput_latency as throughput
from reproduce.pages.page_records import Records, source
from reproduce.paper import auto_against_fixed, reproduction
from reproduce.paper.published import SELF
from reproduce.paper.reproduction import ACCEPTANCE, COST_MODEL, NONE, SLOWER, SPEEDUPS, Record, number, speedup_text
from reproduce.performance_page import grid


def text(record: Record, *names: str) -> list[str]:
    return [str(record.get(name)) if record.get(name) is not None else "-" for name in names]


def by_size(record: Record) -> tuple:
    who = record["model"], reproduction.draft_name(record) != SELF, reproduction.draft_name(record)
    return *who, record["prefix_len"], record["B"], record["gamma"], record.get("draft_budget") or 0


def own_table(records: Sequence[Record], head: Sequence[str], line: Callable[[Record], list[str]], file: str) -> str:
    if not records:
        return f"{NONE} (no record in `results/{file}`)."
    return f"{grid(head, [line(record) for record in records])}\n\n{source(records)}"


SIZE = ["model", "draft", "rows", "prompt", "gamma", "budget", "draft weights"]


def size(record: Record) -> list[str]:
    who = [record["model"], reproduction.draft_name(record)]
    weights = record.get("draft_weights") or str(record.get("draft_dtype"))
    return [*who, *text(record, "B", "prefix_len", "gamma", "draft_budget"), weights]


def speedup_line(record: Record) -> list[str]:
    same = record.get("identical_sequences")
    return [
        *size(record),
        *(speedup_text(record.get(key)) for key in ("speedup", "wall_speedup")),
        speedup_text(speedup_tables.formula_speedup(record)),
        number(record.get("acceptance_rate"), 3),
        number(record.get("mean_accepted_length")),
        f"{same} of {record['sequences']}" if same is not None else "-",
        number(record.get("distinct_4gram_fraction")),
    ]


def cost_line(record: Record) -> list[str]:
    times = (number(record.get(f"{what}_ms"), 1) for what in ("baseline_step", "draft_step", "verify_step", "round"))
    return [*size(record), *times, *(number(cost_ratios.ratio_of(record, kind)) for kind in cost_ratios.KINDS)]


def throughput_line(record: Record) -> list[str]:
    points = throughput.plain_point(record), throughput.speculative_point(record)
    values = (value for p in points for value in ((p.ms_per_token, p.tokens_per_second) if p else (None, None)))
    return [*size(record), *(number(value, 1) for value in values)]


def acceptance_line(row: Record) -> list[str]:
    return [
        row["model"],
        reproduction.draft_name(row),
        row["text"],
        row["draft_policy"],
        *text(row, "draft_budget", "prefix_len", "B", "gamma"),
        number(row["acceptance_rate"], 3),
        ", ".join(number(rate, 2) for rate in row.get("acceptance_per_position") or []) or "-",
        *text(row, "judged"),
        number(row.get("mean_accepted_length")),
        number(row.get("distinct_4gram_fraction")),
    ]


def acceptance_order(row: Record) -> tuple:
    who = row["model"], reproduction.draft_name(row)
    return *who, row["text"], row["draft_policy"], row["draft_budget"] or 0, row["prefix_len"], row["B"]


def figure_of(name: str, folder: Path) -> str:
    return f"![{name.replace('_', ' ')}](figures/{name}.svg)\n\n" if (folder / f"{name}.svg").is_file() else ""


def cost_model_section(records: Sequence[Record], figures: Path) -> str:
    """Predicted beside measured speedups, and `--gamma auto` beside fixed gammas."""
    title = "### The cost model\n\n"
    if not records:
        return f"{title}{NONE} (no record in `results/{COST_MODEL}`)."
    compared = cost_model_error.comparisons(records)
    grids = [cost_model_error.grid_of(record) for record in records if record["benchmark"] == "cost_model"]
    costs = "".join(f"```text\n{cost_table(measured)}\n```\n\n" for measured in grids)
    return (
        f"{title}Predicted by `engine.cost_model` from costs over random entries, measured on a grid in a process of "
        "its own, with the acceptance of the run that it is compared with; rows and contexts off that grid are "
        f"interpolated. {cost_model_error.error_summary(compared).capitalize()}.\n\n"
        f"{costs}{figure_of(cost_model_error.NAME, figures)}"
        f"{grid(cost_model_error.ERROR_HEAD, cost_model_error.error_lines(compared))}\n\n"
        "Ways that choose from round to round, in turn with plain decoding and fixed gammas from one prefilled state. "
        f"*{auto_against_fixed.BEST}*: of the best fixed way, or plain decoding. *auto / better*: over gamma 3 or "
        "plain decoding, whichever has the larger median speedup, in the same repeat: the median of the repeats, its "
        "90% interval (from the repeats' order, if there are five or more; prompts are the same in "
        "all, so it is about the machine), and the lowest repeat. Right before each of its runs a way that chooses "
        "measures costs and acceptance anew, on the same prompts, which is in no speedup: with greedy decoding it has "
        "then seen how its drafts of the next tokens fare.\n\n"
        f"{''.join(choosing_section(way, records) for way in auto_against_fixed.WAYS)}{source(records)}"
    )


def choosing_section(choosing: auto_against_fixed.Choosing, records: Sequence[Record]) -> str:
    lines = auto_against_fixed.lines(choosing, records)
    if not lines:
        return f"{choosing.title}: {NONE}.\n\n"
    compared = grid(auto_against_fixed.HEAD, lines)
    return f"{choosing.title}:\n\n{compared}\n\n{auto_against_fixed.summary(choosing, records).capitalize()}.\n\n"


def measured_section(records: Records, figures: Path) -> str:
    runs = sorted(records.speculation, key=by_size)
    swept_costs = [record for record in records.costs if record["file"] == SPEEDUPS]
    costs = sorted([*runs, *swept_costs], key=by_size)
    rows = sorted(acceptance_by_context.rows_of(records.acceptance), key=acceptance_order)
    head = ["speedup", "to the last row", "by the formula", "acceptance", "tokens a round", "rows identical"]
    speed = own_table(runs, [*SIZE, *head, "distinct 4-grams"], speedup_line, SPEEDUPS)
    head = ["plain step, ms", "draft step, ms", "verification, ms", "round, ms", *cost_ratios.KINDS.values()]
    cost = own_table(costs, [*SIZE, *head], cost_line, SPEEDUPS)
    head = ["plain, ms a token", "plain, tokens/s", "speculation, ms a token", "speculation, tokens/s"]
    flow = own_table(runs, [*SIZE, *head], throughput_line, SPEEDUPS)
    head = [
        "model",
        "draft",
        "text",
        "policy",
        "budget",
        "prompt",
        "rows",
        "gamma",
        "acceptance",
        "by place in the block",
    ]
    accepted = own_table(
        rows, [*head, "judged drafts", "tokens a round", "distinct 4-grams"], acceptance_line, ACCEPTANCE
    )
    by_context, by_budget = (figure_of(one.NAME, figures) for one in (acceptance_by_context, acceptance_by_budget))
    return (
        "## Measured here\n\n"
        "Every run whose record is in the files named below the tables. Speedups are over plain decoding in the same "
        "process, from the same prefilled state.\n\n"
        f"### Speedup\n\n`{SLOWER}`: slower than plain decoding. *by the formula*: what the published formula makes of "
        "the acceptance and the step times of the same run. *distinct 4-grams* near 0 warns of rows that loop, which "
        f"inflates acceptance.\n\n{figure_of(speedup_tables.NAME, figures)}{speed}\n\n"
        f"### Costs\n\n{figure_of(cost_ratios.NAME, figures)}{cost}\n\n"
        "### Throughput against latency\n\nThe published figure has no numbers that are recorded here.\n\n"
        f"{figure_of(throughput.NAME, figures)}{flow}\n\n"
        "### Acceptance\n\nText: `greedy` and `sampled` are the model's own continuation, `book` the book's.\n\n"
        f"{by_context}{by_budget}{accepted}\n\n"
        f"{cost_model_section(records.cost_model, figures)}"
    )
