"""Speedup over plain decoding by rows, context and draft, published and measured side by side, losses included.

python reproduce/speedup_tables.py
python reproduce/speedup_tables.py --model CHECKPOINT --B 32 64 128 --prefix_len 8000 32000 --gamma 3 4 --compile
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from common.exit import exit_on_user_error
from reproduce.paper import reproduction
from reproduce.paper.figures import Figure, Panel, Series, shades
from reproduce.paper.published import SELF, Ratio, Speedup, published, same_context, speedup
from reproduce.paper.reproduction import (
    NONE,
    Record,
    Sizes,
    number,
    published_speedup_text,
    quotient,
    side_by_side,
    speedup_text,
)

NAME = "speedup_tables"
SIZES = Sizes()
FIGURE_6 = "figure 6, 8xA100"


@dataclass(frozen=True)
class Setting:
    """What a published and a measured speedup have to share to stand in one row. draft: "self" or a model."""

    target: str
    draft: str
    context: int
    B: int
    gamma: int | None

    @property
    def order(self) -> tuple:
        return self.target, self.draft != SELF, self.draft, self.context, self.B, self.gamma or 0


def setting_of(fact: Speedup) -> Setting:
    return Setting(fact.target, fact.draft, fact.context, fact.B, fact.gamma)


def setting_of_record(record: Record) -> Setting:
    """With the published context, where it is the same but for a few tokens."""
    target, draft = reproduction.target_name(record), reproduction.draft_name(record)
    own = record["prefix_len"]
    facts = (*published().speedup_tables, *published().figure_6)
    near = (f.context for f in facts if (f.target, f.draft) == (target, draft) and same_context(f.context, own))
    return Setting(target, draft, next(near, own), record["B"], record["gamma"])


def formula_speedup(record: Record) -> float | None:
    """What the published formula makes of the record's own acceptance and step times."""
    draft, verify = quotient(record, "draft_step_ms"), quotient(record, "verify_step_ms")
    alpha = record.get("acceptance_rate")
    if draft is None or verify is None or alpha is None:
        return None
    return speedup(alpha, record["gamma"], draft, verify)


def published_columns() -> dict[str, dict[Setting, float]]:
    """Each machine's table, and the figure's grid, by setting."""
    facts = published()
    columns = {
        machine: {setting_of(fact): fact.speedup for fact in facts.speedup_tables if fact.machine == machine}
        for machine in facts.machines
    }
    return columns | {FIGURE_6: {setting_of(fact): fact.speedup for fact in facts.figure_6}}


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    found: dict[Setting, list[Record]] = {}
    for record in records:
        found.setdefault(setting_of_record(record), []).append(record)
    return found


def table(records: list[Record]) -> str:
    columns, measured = published_columns(), by_setting(records)
    head = ["target", "draft", "context", "rows", "gamma", "budget", *columns]
    head += ["measured", "to the last row", "acceptance", "by the formula"]
    settings = sorted({*measured, *(key for column in columns.values() for key in column)}, key=lambda key: key.order)
    lines = []
    for key in settings:
        for record in measured.get(key, [{}]):
            place = [key.target, key.draft, str(key.context), str(key.B), str(key.gamma or "-")]
            place.append(str(record.get("draft_budget", published().draft_budget)))
            known = [_published_text(column, key) for column in columns.values()]
            lines.append([*place, *known, *_measured_texts(record)])
    return (
        "  Speedup over plain decoding\n\n"
        f"{reproduction.differences(records)}\n"
        f"  {reproduction.SLOWER}: slower than plain decoding. Measured: over the rounds in which all rows are busy, "
        "and to the last row.\n  By the formula: what the published formula makes of the measured acceptance and step "
        "times.\n  Figure 6 was read off a plot, to about 0.02.\n\n" + side_by_side(head, lines)
    )


def _published_text(column: Mapping[Setting, float], key: Setting) -> str:
    return published_speedup_text(column[key]) if key in column else "-"


def _measured_texts(record: Record) -> list[str]:
    if not record:
        return [NONE, "-", "-", "-"]
    return [
        speedup_text(record["speedup"]),
        speedup_text(record.get("wall_speedup")),
        number(record["acceptance_rate"], 3),
        speedup_text(formula_speedup(record)),
    ]


def figure(records: list[Record]) -> Figure:
    """A panel for each published pair of models; measured self-speculation or draft models are in those like it."""
    facts = published().figure_6
    pairs = list(dict.fromkeys((fact.target, fact.draft) for fact in facts))
    kept = [record for record in records if record.get("speedup") is not None]
    colours = shades([fact.context for fact in facts] + [record["prefix_len"] for record in kept])
    common = shared(kept)
    panels = []
    for target, draft in pairs:
        known = [fact for fact in facts if (fact.target, fact.draft) == (target, draft)]
        own = [record for record in kept if (reproduction.draft_name(record) == SELF) == (draft == SELF)]
        title = f"published: {target}, {'self' if draft == SELF else draft} draft"
        series = [*published_series(known, "speedup", colours), *measured_series(own, "speedup", colours, common)]
        panels.append(Panel(title, "rows decoded together", "speedup", tuple(series), reference=(1, "plain decoding")))
    return Figure(f"Speedup over plain decoding\n{common}".strip(), tuple(panels))


def published_series(facts: Sequence[Speedup | Ratio], value: str, colours: Mapping[float, str]) -> list[Series]:
    """Over the rows decoded together, one line for each prompt."""
    groups: dict[int, list[Speedup | Ratio]] = {}
    for fact in facts:
        groups.setdefault(fact.context, []).append(fact)
    return [
        Series(
            f"published, {context} tokens",
            [fact.B for fact in group],
            [getattr(fact, value) for fact in group],
            colours[context],
            is_published=True,
        )
        for context, group in groups.items()
    ]


def measured_series(records: Iterable[Record], value: str, colours: Mapping[float, str], title: str) -> list[Series]:
    """Over the rows decoded together, one line for each prompt and way to draft; `title` as of `shared`."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get(value) is not None:
            own = [part for part in way(record) if part not in title]
            label = ", ".join(["measured", f"{record['prefix_len']} tokens", *own])
            groups.setdefault(label, []).append(record)
    return [
        Series(
            label,
            [record["B"] for record in group],
            [record[value] for record in group],
            colours[group[0]["prefix_len"]],
            marker="o" if reproduction.draft_name(group[0]) == SELF else "s",
        )
        for label, group in groups.items()
    ]


def way(record: Record) -> tuple[str, ...]:
    """The target, and how it is drafted for."""
    draft = f"{reproduction.draft_name(record)} draft in {record.get('draft_weights') or record.get('draft_dtype')}"
    place = f"gamma {record['gamma']}", f"budget {record['draft_budget']}"
    return reproduction.target_name(record), draft, *place


def shared(records: Sequence[Record]) -> str:
    """What all of them have in common, for a title."""
    ways = [way(record) for record in records]
    common = [values[0] for values in zip(*ways, strict=True) if len(set(values)) == 1]
    return f"measured: {', '.join(common)}" if common else ""


def main() -> None:
    args = reproduction.speculation_parser(__doc__.splitlines()[0], SIZES).parse_args()
    reproduction.present(args, reproduction.speculation_cells(args), NAME, table, figure)


if __name__ == "__main__":
    exit_on_user_error(main)
