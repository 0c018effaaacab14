"""The roofline against what was published, and against this CPU: how far predictions are off.

    python reproduce/roofline_error.py
    python reproduce/roofline_error.py --measure

--measure takes about two minutes.
"""

import common.startup

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import cli
from common.jsonl import append_record, publish, require_appendable
from common.provenance import git_commit
from common.tables import Column, console
from reproduce.paper import figures
from reproduce.paper.figures import POINTS, Figure, Panel, diagonal, lines
from reproduce.paper.predicted import FLASH_ATTENTION_2, is_acceptance_known, machine_of, predict
from reproduce.paper.published import Record, draft_name, published, target_name
from reproduce.paper.reproduction import REPRODUCTION, make_ready

NAME, ROOFLINE = "roofline_error", "roofline.jsonl"
KNOWN, ASSUMED = "published acceptance", "assumed acceptance"
# What is assumed of the kernels: fields of a machine.
READ_ONCE = {"tile": 16, "packs_group": True}
WAYS = {
    "data sheets, FlashAttention-2's tiles": FLASH_ATTENTION_2,
    "the same, every entry read once for all heads and tokens": READ_ONCE,
}


@dataclass(frozen=True)
class Flags:
    output: str = str(REPRODUCTION / ROOFLINE)  # file to append the records to
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figure, as PNG and SVG
    measure: bool = False  # also this CPU's rates, and the built-in model's costs beside predictions


def groups() -> dict[str, list[Record]]:
    known = [fact for fact in published().speedups if is_acceptance_known(fact)]
    return {KNOWN: known, ASSUMED: [fact for fact in published().speedups if fact not in known]}


def median_error(facts: Sequence[Record], kernels: Mapping[str, Any]) -> float:
    """Of predictions, each on its machine with such kernels."""
    return median(abs(predict(fact, replace(machine_of(fact), **kernels)) / fact["value"] - 1) for fact in facts)


def errors() -> list[Record]:
    """The median errors of every group, by how it is predicted."""
    return [
        {"way": way} | {name: median_error(facts, kernels) for name, facts in groups().items()}
        for way, kernels in WAYS.items()
    ]


HEADS = (Column(name, f"{name} ({len(facts)})", ".1%") for name, facts in groups().items())
ERRORS = (Column("way", "constants", align="<"), *HEADS)


def rows() -> list[Record]:
    """Every published speedup beside its predictions."""
    return [
        {"group": group, "target": target_name(fact), "draft": draft_name(fact), "origin": fact["origin"]}
        | {name: fact[name] for name in ("prefix_len", "B", "gamma")}
        | {"published": fact["value"], "predicted": predict(fact)}
        for group, facts in groups().items()
        for fact in facts
    ]


def figure(rows: Sequence[Record]) -> Figure:
    equal, axes = diagonal(rows, "published", "predicted"), ("published speedup", "predicted speedup")
    series = [equal, *lines(rows, "group", "published", "predicted", style=POINTS)]
    panel = Panel("from data sheets", *axes, series, is_log_x=False)
    return Figure("Published speedups, and what the roofline predicts", [panel])


def summary() -> str:
    stated, n_known = errors()[0], len(groups()[KNOWN])
    return (
        f"predictions from data sheets are off by {stated[KNOWN]:.1%} in the median of the {n_known} published "
        f"speedups whose acceptance is published, and by {stated[ASSUMED]:.0%} where it had to be assumed"
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
