"""Every policy of a self-draft's cache by its budget: acceptance on each kind of text, and what it costs and gains.

python reproduce/policies.py

Resumable: cells that have a record are not run again. Needles (passkey, multikey) are asked for at the end of a text
that tells them early, where a recent window has forgotten them; what is judged is the right answer, teacher-forced.
"""

from functools import partial

from common import cli
from common.tables import console
from reproduce.paper import columns
from reproduce.paper.figures import BLACK, CATEGORIES, MARKERS, POLICIES, Figure, Style, by_budget, lines
from reproduce.paper.published import Record
from reproduce.paper.reproduction import showing

USUAL_GAMMA = 3
ERRORS = "Standard errors are over rows. Needles: the tokens of the right answers, each a few hundred at most."
REFRESH = "Refresh: what choosing takes in a round that chooses anew. Rates are of rounds in which all rows are busy."


def judged(records: list[Record]) -> list[Record]:
    return columns.newest_of_policies(record for record in records if "rows" in record)


def timed(records: list[Record]) -> list[Record]:
    return [record for record in records if "speedup" in record]


def table(records: list[Record]) -> str:
    parts = []
    for title, rows, name, note in (
        ("Acceptance by policy", judged(records), "policies_acceptance", ERRORS),
        ("Speed by policy", timed(records), "policies_speed", REFRESH),
    ):
        ordered = sorted(rows, key=lambda row: (str(row.get("text")), row["prefix_len"], row["B"], row["draft_policy"]))
        parts.append(f"  {title}\n\n{console(ordered, columns.of(name))}\n\n  {note}")
    return "\n\n".join(parts)


def drawn(rows: list[Record]) -> list[Record]:
    """Those of drafts that have no draft of their own, at the usual gamma; without a budget they read the context."""
    alone = [row for row in rows if row["gamma"] in (USUAL_GAMMA, "auto") and not row.get("draft_of_draft")]
    read = [row | {"draft_budget": row["draft_budget"] or row["prefix_len"]} for row in alone]
    return sorted(read, key=lambda row: (row["prefix_len"], row["B"]))


def label(row: Record) -> str:
    return row["draft_policy"] + (f", {row['draft_weights']} weights" if row.get("draft_weights") else "")


def look(row: Record) -> Style:
    """A colour and a marker for each policy, the same in every panel; open where weights are quantised."""
    looks = dict(zip(POLICIES, zip(CATEGORIES, MARKERS, strict=False), strict=False))
    color, marker = looks.get(row["draft_policy"], (BLACK, "*"))
    return {"color": color, "marker": marker} | ({"markerfacecolor": "none"} if row.get("draft_weights") else {})


def acceptance_figure(records: list[Record]) -> Figure:
    curves = partial(lines, label=label, x="draft_budget", y="acceptance_rate", look=look)
    panel = "context of {prefix_len} tokens, text {text}"
    return by_budget("Acceptance by entries read", drawn(judged(records)), panel, "acceptance rate", curves)


def speedup_figure(records: list[Record]) -> Figure:
    curves = partial(lines, label=label, x="draft_budget", y="speedup", look=look)
    panel = "context of {prefix_len} tokens, B {B}"
    return by_budget("Speedup by budget", drawn(timed(records)), panel, "speedup", curves)


FIGURES = {"policies_acceptance": acceptance_figure, "policies_speedup": speedup_figure}

if __name__ == "__main__":
    cli.run_alone(*showing("policies.jsonl", table, FIGURES))
