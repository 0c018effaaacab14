"""Every policy of a self-draft's cache by its budget: acceptance on each kind of text, and what it costs and gains.

python reproduce/policies.py

Resumable: cells that have a record are not run again. Needles (passkey, multikey) are asked for at the end of a text
that tells them early, where a recent window has forgotten them; what is judged is the right answer, teacher-forced.
"""

import common.startup

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from common import cli
from common.tables import console
from reproduce.paper import columns
from reproduce.paper.figures import Figure, Panel, lines
from reproduce.paper.published import Record, grouped
from reproduce.paper.reproduction import showing

ERRORS = "Standard errors are over rows. Needles: the tokens of the right answers, each a few hundred at most."
REFRESH = "Refresh: what choosing takes in a round that chooses anew. Rates are of rounds in which all rows are busy."


def judged(records: list[Record]) -> list[Record]:
    """The rows of acceptance, of which a record has several."""
    return columns.rows_of([record for record in records if "rows" in record])


def timed(records: list[Record]) -> list[Record]:
    return [record for record in records if "speedup" in record]


def table(records: list[Record]) -> str:
    """For the console."""
    parts = []
    for title, rows, name, note in (
        ("Acceptance by policy", judged(records), "policies_acceptance", ERRORS),
        ("Speed by policy", timed(records), "policies_speed", REFRESH),
    ):
        ordered = sorted(rows, key=lambda row: (str(row.get("text")), row["prefix_len"], row["B"], row["draft_policy"]))
        parts.append(f"  {title}\n\n{console(ordered, columns.of(name))}\n\n  {note}")
    return "\n\n".join(parts)


def by_panel(
    title: str, rows_of: Callable, panel: str, y: str, y_label: str, is_speedup: bool, records: list[Record]
) -> Figure:
    """A panel for each value of a setting, in each a line for each policy over the entries that it reads."""
    panels = []
    for (context, value), rows in grouped(rows_of(records), itemgetter("prefix_len", panel)).items():
        alone = [row for row in rows if row["draft_budget"] and not row.get("draft_of_draft")]
        curves = lines(alone, "draft_policy", "draft_budget", y)
        name = f"context of {context} tokens, {panel} {value}"
        panels.append(Panel(name, "budget, KV entries read", y_label, curves, is_speedup=is_speedup))
    return Figure(title, panels)


FIGURES = {
    "policies_acceptance": partial(
        by_panel, "Acceptance by entries read", judged, "text", "acceptance_rate", "acceptance rate", False
    ),
    "policies_speedup": partial(by_panel, "Speedup by budget", timed, "B", "speedup", "speedup", True),
}

if __name__ == "__main__":
    cli.run_alone(*showing("policies.jsonl", table, FIGURES))
