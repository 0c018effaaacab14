"""Every policy of a self-draft's cache by its budget: acceptance on each kind of text, and what it costs and gains.

python reproduce/policies.py

Resumable: cells that have a record are not run again. Needles (passkey, multikey) are asked for at the end of a text
that tells them early, where a recent window has forgotten them; what is judged is the right answer, teacher-forced.
"""

import common.startup

from functools import partial

from common import cli
from common.tables import console
from reproduce.paper import columns
from reproduce.paper.figures import Figure, by_budget, lines
from reproduce.paper.published import Record
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


def alone(rows: list[Record]) -> list[Record]:
    """Those of drafts with a budget that have no draft of their own."""
    return [row for row in rows if row["draft_budget"] and not row.get("draft_of_draft")]


def acceptance_figure(records: list[Record]) -> Figure:
    curves = partial(lines, label="draft_policy", x="draft_budget", y="acceptance_rate")
    panel = "context of {prefix_len} tokens, text {text}"
    return by_budget("Acceptance by entries read", alone(judged(records)), panel, "acceptance rate", curves)


def speedup_figure(records: list[Record]) -> Figure:
    curves = partial(lines, label="draft_policy", x="draft_budget", y="speedup")
    return by_budget(
        "Speedup by budget", alone(timed(records)), "context of {prefix_len} tokens, B {B}", "speedup", curves
    )


FIGURES = {"policies_acceptance": acceptance_figure, "policies_speedup": speedup_figure}

if __name__ == "__main__":
    cli.run_alone(*showing("policies.jsonl", table, FIGURES))
