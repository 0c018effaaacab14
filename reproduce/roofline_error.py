"""The roofline against what was published, and against this CPU: how far predictions are off, and by which constant.

    python reproduce/roofline_error.py
    python reproduce/roofline_error.py --measure

Two constants are fitted to half of the published speedups whose acceptance is published, and tested on the other half.
--measure takes about two minutes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import numpy as np

from common import cli
from common.jsonl import append_record, publish, require_appendable
from common.provenance import git_commit
from common.tables import Column, console
from cost_model.machines import Machine
from reproduce.paper import figures
from reproduce.paper.figures import POINTS, Figure, Panel, diagonal, lines
from reproduce.paper.predicted import halves, is_acceptance_known, machine_of, predict
from reproduce.paper.published import Record, draft_name, published, target_name
from reproduce.paper.reproduction import REPRODUCTION, make_ready

NAME, ROOFLINE = "roofline_error", "roofline.jsonl"
GROUPS = ("published acceptance, half to fit", "published acceptance, other half", "assumed acceptance")
# What a fit tries of two constants: factors of what is stated.
TRIED = {"memory bandwidth": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), "link bandwidth": (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)}
STATED = 1.0, 1.0


@dataclass(frozen=True)
class Flags:
    output: str = str(REPRODUCTION / ROOFLINE)  # file to append the records to
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figure, as PNG and SVG
    measure: bool = False  # also this CPU's rates, and the built-in model's costs beside predictions


def groups() -> dict[str, list[Record]]:
    known = [fact for fact in published().speedups if is_acceptance_known(fact)]
    assumed = [fact for fact in published().speedups if fact not in known]
    return dict(zip(GROUPS, (*halves(known), assumed), strict=True))


def scaled(factors: tuple[float, ...], one: Machine) -> Machine:
    """The machine with such factors of what is stated of TRIED."""
    bandwidth, link = factors
    slower = (each._replace(bandwidth=each.bandwidth * link) for each in one.protocols)
    return replace(one, bandwidth=one.bandwidth * bandwidth, protocols=tuple(slower))


def ratios(facts: Sequence[Record], change: Callable[[Machine], Machine]) -> list[float]:
    """Predicted over published numbers, each on its machine with that change."""
    return [predict(fact, change(machine_of(fact))) / fact["value"] for fact in facts]


def median_error(facts: Sequence[Record], change: Callable[[Machine], Machine]) -> float:
    return median(abs(ratio - 1) for ratio in ratios(facts, change))


def fit(facts: Sequence[Record]) -> tuple[float, ...]:
    """Of the factors tried, those that leave least of the logarithms' differences, in the mean of their squares."""
    return min(
        itertools.product(*TRIED.values()),
        key=lambda factors: np.square(np.log(ratios(facts, partial(scaled, factors)))).mean(),
    )


@cache
def fitted() -> tuple[float, ...]:
    """To the one half of those whose acceptance is published."""
    return fit(groups()[GROUPS[0]])


def said() -> str:
    return " and ".join(f"{name} x {factor:g}" for name, factor in zip(TRIED, fitted(), strict=True))


def errors() -> list[Record]:
    """The median errors of every group, by how it is predicted."""
    ways = {
        "data sheets, FlashAttention-2's tiles": partial(scaled, STATED),
        "the same, every entry read once for all heads and tokens": partial(replace, tile=16, packs_group=True),
        f"fitted: {said()}": partial(scaled, fitted()),
    }
    by_group = {way: {name: median_error(facts, of) for name, facts in groups().items()} for way, of in ways.items()}
    return [{"way": way} | medians for way, medians in by_group.items()]


HEADS = (Column(name, f"{name} ({len(facts)})", ".1%") for name, facts in groups().items())
ERRORS = (Column("way", "constants", align="<"), *HEADS)


def rows() -> list[Record]:
    """Every published speedup beside its predictions."""
    best = partial(scaled, fitted())
    return [
        {"group": group, "target": target_name(fact), "draft": draft_name(fact), "origin": fact["origin"]}
        | {name: fact[name] for name in ("prefix_len", "B", "gamma")}
        | {"published": fact["value"], "predicted": predict(fact), "fitted": predict(fact, best(machine_of(fact)))}
        for group, facts in groups().items()
        for fact in facts
    ]


def figure(rows: Sequence[Record]) -> Figure:
    equal, axes = diagonal(rows, "published", "predicted"), ("published speedup", "predicted speedup")
    titles = {"predicted": "from data sheets", "fitted": f"two constants fitted:\n{said()}"}
    panels = [
        Panel(title, *axes, [equal, *lines(rows, "group", "published", of, style=POINTS)], is_log_x=False)
        for of, title in titles.items()
    ]
    return Figure("Published speedups, and what the roofline predicts", panels)


def summary() -> str:
    (stated, _, after), (half, other, assumed) = errors(), GROUPS
    known = [*groups()[half], *groups()[other]]
    error = median_error(known, partial(scaled, STATED))
    return (
        f"predictions from data sheets are off by {error:.1%} in the median of the {len(known)} published speedups "
        f"whose acceptance is published, and by {stated[assumed]:.0%} where it had to be assumed; two constants, "
        f"fitted to half of the former, leave {after[other]:.1%} on the other half, {stated[other]:.1%} before"
    )


def main(flags: Flags) -> None:
    make_ready(flags.output)
    require_appendable(flags.output)
    texts = [f"  {summary().capitalize()}.\n", console(errors(), ERRORS), ""]
    if flags.measure:
        from reproduce.paper import cpu_roofline

        append_record(flags.output, record := cpu_roofline.measure())
        texts.append(f"  {cpu_roofline.summary([record])}\n")
    own = {"benchmark": NAME, "git_commit": git_commit(), "errors": errors(), "rows": rows()}
    texts += [f"  {path}" for path in figures.save(figure(own["rows"]), NAME, Path(flags.figures))]
    publish(flags.output, own, *texts)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
