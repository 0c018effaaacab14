"""The roofline against what was published, and against this CPU: how far predictions are off, and by which constant.

    python reproduce/roofline_error.py
    python reproduce/roofline_error.py --measure

Published speedups are predicted from data sheets; then two constants are fitted to half of those whose acceptance is
published, and tested on the other half. With --measure this CPU's rates and the built-in model's costs are measured,
too, in about two minutes.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from common import cli
from common.jsonl import append_record, publish, require_appendable
from common.provenance import git_commit
from common.tables import Column, console
from reproduce.paper import figures
from reproduce.paper.figures import MEASURED, POINTS, Figure, Panel, Series, lines
from reproduce.paper.predicted import (
    IDEAL,
    STATED,
    TRIED,
    Roofline,
    fit,
    halves,
    is_acceptance_known,
    median_error,
    spread,
)
from reproduce.paper.published import Record, draft_name, published, target_name
from reproduce.paper.reproduction import REPRODUCTION

NAME, ROOFLINE = "roofline_error", "roofline.jsonl"
FITTED, HELD_BACK, GUESSED = (
    "published acceptance, half to fit",
    "published acceptance, other half",
    "assumed acceptance",
)


@dataclass(frozen=True)
class Flags:
    output: str = str(REPRODUCTION / ROOFLINE)  # file to append the records to
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figure, as PNG and SVG
    measure: bool = False  # also this CPU's rates, and the built-in model's costs beside predictions


def groups() -> dict[str, list[Record]]:
    """The published speedups."""
    known = [fact for fact in published().speedups if is_acceptance_known(fact)]
    fitted, held_back = halves(known)
    return {FITTED: fitted, HELD_BACK: held_back, GUESSED: [one for one in published().speedups if one not in known]}


@cache
def fits() -> dict[tuple[str, ...], Roofline]:
    """Every constant, and every two, fitted to the one half; those that leave least of its differences first."""
    names = [*itertools.combinations(TRIED, 1), *itertools.combinations(TRIED, 2)]
    found = {each: fit(groups()[FITTED], each) for each in names}
    return dict(sorted(found.items(), key=lambda item: spread(groups()[FITTED], item[1])))


def best_fit(n: int) -> Roofline:
    """Of so many constants: the one that leaves least."""
    return next(of for names, of in fits().items() if len(names) == n)


def said(roofline: Roofline) -> str:
    """Its constants, as a sentence has them."""
    return " and ".join(
        f"{name} x {value:g}" if "ms" not in name else f"{value:g} {name}" for name, value in roofline.constants.items()
    )


def errors() -> list[Record]:
    """The median errors of every group, by how it is predicted."""
    ways = {
        "data sheets, FlashAttention-2's tiles": STATED,
        "the same, every entry read once for all heads and tokens": IDEAL,
        **{f"fitted: {said(of)}": of for of in (best_fit(1), best_fit(2))},
    }
    return [
        {"way": way} | {name: median_error(facts, of) for name, facts in groups().items()} for way, of in ways.items()
    ]


ERRORS = (
    Column("way", "constants", align="<"),
    *(Column(name, f"{name} ({len(facts)})", ".1%") for name, facts in groups().items()),
)
LEFT = (
    Column("constant", "constant", align="<"),
    Column("fitted", "fitted", "g"),
    Column("left", "left of the spread", ".0%"),
)


def constants() -> list[Record]:
    """Of each constant alone what is fitted to the one half, and what that leaves of the differences there."""
    half, alone = groups()[FITTED], [item for item in fits().items() if len(item[0]) == 1]
    return [
        {"constant": name, "fitted": of.constants[name], "left": spread(half, of) / spread(half, STATED)}
        for (name,), of in alone
    ]


def rows() -> list[Record]:
    """Every published speedup beside its predictions."""
    ways = {"predicted": STATED, "fitted": best_fit(2)}
    return [
        {"group": group, "target": target_name(fact), "draft": draft_name(fact), "origin": fact["origin"]}
        | {name: fact[name] for name in ("prefix_len", "B", "gamma")}
        | {"published": fact["value"]}
        | {name: of.value(fact) for name, of in ways.items()}
        for group, facts in groups().items()
        for fact in facts
    ]


def figure() -> Figure:
    numbers = [row[name] for row in rows() for name in ("published", "predicted")]
    ends = [min(numbers), max(numbers)]
    diagonal = Series("equal", ends, ends, MEASURED | {"color": "#999999"})
    titles = {"predicted": "from data sheets", "fitted": f"two constants fitted:\n{said(best_fit(2))}"}
    axes = "published speedup", "predicted speedup"
    panels = [
        Panel(title, *axes, [diagonal, *lines(rows(), "group", "published", of, style=POINTS)], is_log_x=False)
        for of, title in titles.items()
    ]
    return Figure("Published speedups, and what the roofline predicts", panels)


def summary() -> str:
    stated, *_, fitted = errors()
    n = len(groups()[FITTED]) + len(groups()[HELD_BACK])
    known = median_error([*groups()[FITTED], *groups()[HELD_BACK]], STATED)
    return (
        f"predictions from data sheets are off by {known:.1%} in the median of the {n} published speedups whose "
        f"acceptance is published, and by {stated[GUESSED]:.0%} where it had to be assumed; two constants, fitted to "
        f"half of the former, leave {fitted[HELD_BACK]:.1%} on the other half, {stated[HELD_BACK]:.1%} before"
    )


def cpu_summary(records: Sequence[Record]) -> str:
    """How far off predictions are in each run on a CPU."""
    from reproduce.paper.cpu_roofline import error

    runs = [[median(abs(error(row)) for row in record[name]) for name in ("rows", "speedups")] for record in records]
    costs, speedups = (" and ".join(f"{off:.0%}" for off in each) for each in zip(*runs, strict=True))
    last = records[-1]
    return (
        f"on a CPU ({last['machine']}, threads: {last['threads']}) predicted costs are off by {costs} in the median of "
        f"{len(last['rows'])}, and speedups that follow from them by {speedups}, run by run"
    )


def main(flags: Flags) -> None:
    figures.require_matplotlib()
    if Path(flags.output).parent == REPRODUCTION:
        REPRODUCTION.mkdir(exist_ok=True)
    require_appendable(flags.output)
    texts = [f"  {summary().capitalize()}.\n", console(errors(), ERRORS), "", console(constants(), LEFT), ""]
    if flags.measure:
        from reproduce.paper.cpu_roofline import measure

        record = measure()
        append_record(flags.output, record)
        texts.append(f"  {cpu_summary([record])}\n")
    texts += [f"  {path}" for path in figures.save(figure(), NAME, Path(flags.figures))]
    own = {"benchmark": NAME, "git_commit": git_commit(), "errors": errors(), "constants": constants(), "rows": rows()}
    publish(flags.output, own, *texts)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
