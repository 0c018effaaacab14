"""Tables of Foretoken's own measurements: speedups, costs, throughput against latency, acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.tables import markdown
from engine.bench.cost_tables import cost_columns, cost_rows
from reproduce import acceptance_by_budget, acceptance_by_context, cost_model_error, cost_ratios, speedup_tables
from reproduce import throughput_latency as throughput
from reproduce.pages.page_records import Records, absent, source, table
from reproduce.paper import auto_against_fixed, columns
from reproduce.paper.columns import ACCEPTANCE, FLOW, NONE, SETTING, SLOWER, STEPS, by_size, of
from reproduce.paper.published import Record
from reproduce.paper.reproduction import ACCEPTANCE as ACCEPTANCE_FILE
from reproduce.paper.reproduction import COST_MODEL, SPEEDUPS


def figure_of(name: str, folder: Path) -> str:
    return f"![{name.replace('_', ' ')}](figures/{name}.svg)\n\n" if (folder / f"{name}.svg").is_file() else ""


def cost_model_section(records: Sequence[Record], figures: Path) -> str:
    """Predicted beside measured speedups, and `--gamma auto` beside fixed gammas."""
    if not records:
        return absent("The cost model", COST_MODEL)
    compared = cost_model_error.comparisons(records)
    grids = [cost_model_error.grid_of(record) for record in records if record["benchmark"] == "cost_model"]
    costs = "".join(f"{markdown(cost_rows(grid), cost_columns(grid))}\n\n" for grid in grids)
    return (
        "Predicted by `engine.cost_model` from costs over random entries, measured on a grid in a process of "
        "its own, with the acceptance of the run that it is compared with; rows and contexts off that grid are "
        f"interpolated. {cost_model_error.error_summary(compared).capitalize()}.\n\n"
        f"The grid; verifications and draft steps in plain steps:\n\n{costs}"
        f"{figure_of(cost_model_error.NAME, figures)}{markdown(compared, cost_model_error.ERRORS)}\n\n"
        "What chooses from round to round, interleaved with plain decoding and fixed gammas from one prefilled state. "
        f"*{auto_against_fixed.BEST}*: of the best fixed choice, or plain decoding. *auto / better*: over gamma 3 or "
        "plain decoding, whichever has the larger median speedup, in the same repeat: the median of the repeats, its "
        "90% interval (from the repeats' order, if there are five or more; prompts are the same in "
        "all, so it is about the machine), and the lowest repeat. Right before each of its runs `auto` "
        "measures costs and acceptance anew, on the same prompts, which is in no speedup: with greedy decoding it has "
        "then seen how its drafts of the next tokens fare.\n\n"
        f"{''.join(mode_section(mode, records) for mode in auto_against_fixed.MODES)}{source(records)}"
    )


def mode_section(mode: auto_against_fixed.Mode, records: Sequence[Record]) -> str:
    compared = auto_against_fixed.against_fixed(mode, records)
    if not compared:
        return f"{mode.title}: {NONE}.\n\n"
    summary = auto_against_fixed.summary(compared).capitalize()
    return f"{mode.title}:\n\n{markdown(compared, auto_against_fixed.COLUMNS)}\n\n{summary}.\n\n"


def measured_section(records: Records, figures: Path) -> str:
    runs = sorted(records.speculation, key=by_size)
    costs = sorted([*runs, *(record for record in records.costs if record["file"] == SPEEDUPS)], key=by_size)
    rows = columns.rows_of(records.acceptance)
    rows.sort(key=lambda row: (*by_size(row)[:3], row["text"], row["draft_policy"], row["draft_budget"] or 0))
    setting = of(*SETTING, "draft_weights")
    accepted = "acceptance_rate", "mean_accepted_length", "identical", "distinct_4gram_fraction"
    speedups = of(*setting, "speedup", "wall_speedup", "formula", *accepted)
    steps = of(*setting, *STEPS, "verify / plain", "draft / plain")
    accepted = "acceptance_rate", "acceptance_per_position", "judged", "mean_accepted_length", "distinct_4gram_fraction"
    return (
        "## Measured here\n\n"
        "Every run whose record is in the files named below the tables. Speedups are over plain decoding in the same "
        "process, from the same prefilled state.\n\n"
        f"### Speedup\n\n`{SLOWER}`: slower than plain decoding. *by the formula*: what the published formula makes of "
        "the acceptance and the step times of the same run. *distinct 4-grams* near 0 warns of rows that loop, which "
        f"inflates acceptance.\n\n{figure_of(speedup_tables.NAME, figures)}"
        f"{table('Speedup', runs, speedups, SPEEDUPS)}\n\n"
        f"### Costs\n\n{figure_of(cost_ratios.NAME, figures)}"
        f"{table('Costs', costs, steps, SPEEDUPS)}\n\n"
        "### Throughput against latency\n\nThe published figure has no numbers that are recorded here.\n\n"
        f"{figure_of(throughput.NAME, figures)}"
        f"{table('Throughput against latency', runs, (*setting, *FLOW), SPEEDUPS)}\n\n"
        "### Acceptance\n\nText: `greedy` and `sampled` are the model's own continuation, `book` the book's.\n\n"
        f"{''.join(figure_of(one.NAME, figures) for one in (acceptance_by_context, acceptance_by_budget))}"
        f"{table('Acceptance', rows, of(*ACCEPTANCE, *accepted), ACCEPTANCE_FILE)}\n\n"
        f"### The cost model\n\n{cost_model_section(records.cost_model, figures)}"
    )
