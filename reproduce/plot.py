"""Plot records over the setting that varies most, with a line for each combination of the other settings.

    python -m reproduce.plot results.jsonl
    python -m reproduce.plot sweep.jsonl more.jsonl --x gamma --y acceptance_rate mean_accepted_length

    python -m reproduce.plot long.jsonl --x generated_tokens    # the stretches of runs with --by_length

Reads what benchmarks and reproduce/compare.py append to --output, and sweeps. Repeats are drawn as their median.
Records without both numbers are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from tyro.conf import Positional

import bench
from common import cli
from common.checkout import ROOT
from common.errors import refuse
from reproduce.helpers.records import Record, grouped, read_records

DOUBLED = ("prefix_len", "B", "draft_budget", "gen_len")  # drawn on a logarithmic axis
AXES = (*DOUBLED, "gamma", "temperature")
SETTINGS = (
    *("benchmark", "model", "draft", "draft_model", "draft_policy", "drafter", "way", "text", "text_drafts"),
    *("draft_layers", "draft_dtype", "draft_weights", "draft_kv_dtype", "dataset", "verification", "top_k", "top_p"),
    *("min_p", "repetition_penalty", "min_tokens", "rope_scaling"),
    *("dtype", "quantize", "kv_dtype", "attention", "compile", "tensor_parallel", "data_parallel", "machine", "gpu"),
    *AXES,
)
GENERATED = "generated_tokens"  # where a stretch of --by_length ends
MEASURED = ("speedup", "decode_tokens_per_second", "acceptance_rate")
# Okabe and Ito's palette, without its yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, PANEL_INCHES = "osD^vP", (5.0, 3.6)
Points = dict[str, list[tuple[Any, float]]]


@dataclass(frozen=True)
class Flags:
    records: Positional[tuple[str, ...]]  # files of JSON lines
    x: str | None = None  # number to draw over, such as prefix_len or gamma; by default the setting that varies most
    y: tuple[str, ...] = MEASURED  # numbers to draw
    figures: str = str(ROOT / "reproduction" / "figures")  # folder for the figure, as PNG and SVG


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def choose_x(records: Sequence[Record]) -> str:
    """Return the number that has most values."""
    return max(AXES, key=lambda name: len({record.get(name) for record in records}))


def varied_settings(records: Sequence[Record], x: str) -> list[str]:
    """Return the settings that tell lines apart: each makes more combinations than those before it."""

    def n_kinds(*names: str) -> int:
        return len({repr([record.get(name) for name in names]) for record in records})

    varied: list[str] = []
    for name in dict.fromkeys([*SETTINGS, *bench.option_names()]):
        if name != x and n_kinds(*varied, name) > n_kinds(*varied):
            varied.append(name)
    return varied


def points_of(records: Sequence[Record], x: str, y: str) -> Points:
    """Return each line's points by its label: the medians of `y` over `x`."""
    varied = varied_settings(records, x)

    def label(record: Record) -> str:
        return ", ".join(f"{name} {record[name]}" for name in varied if record.get(name) is not None) or "all"

    return {
        name: sorted((value, median(row[y] for row in rows)) for value, rows in grouped(line, itemgetter(x)).items())
        for name, line in grouped(records, label).items()
    }


def draw(axes: Any, points: Points, x: str, y: str) -> None:
    """Draw a panel."""
    for number, (label, line) in enumerate(points.items()):
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(*zip(*line, strict=True), label=label, **look)
    values = sorted({value for line in points.values() for value, _ in line})
    if x in DOUBLED and values[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    if y.endswith("speedup"):
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), fontsize=7, frameon=False)


def save(panels: dict[str, Points], x: str, name: str, folder: Path) -> list[Path]:
    """Draw a panel for each number, and write PNG and SVG. Errors: ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install -r requirements-dev.txt, or: pip install matplotlib"
        refuse("the Python environment", error, "matplotlib", "figures need matplotlib", fix)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), layout="constrained", dpi=130)
    for axes, (y, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        draw(axes, points, x, y)
    files = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, bbox_inches="tight")
    except OSError as error:
        refuse("figures", error, "a folder that can be written", "a figure cannot be written", "name another folder")
    return files


def main(flags: Flags) -> None:
    records: list[Record] = []
    for path in flags.records:
        for record in read_records(path):
            record |= {"rope_scaling": record.get("config", {}).get("target", {}).get("rope_scaling")}
            rows = record.get("by_length") or [] if flags.x == GENERATED else record.get("rows", [{}])
            records += [record | row | {GENERATED: row.get("generated", [None])[-1]} for row in rows]
    measured = [record for record in records if any(is_number(record.get(y)) for y in flags.y)]
    x, panels = flags.x or choose_x(measured), dict[str, Points]()
    for y in flags.y:
        drawn = [record for record in measured if is_number(record.get(y)) and is_number(record.get(x))]
        if drawn and (flags.x or len({record[x] for record in drawn}) > 1):
            panels[y] = points_of(drawn, x, y)
            print(f"  {y} over {x}: {len(drawn)} of {len(records)} records have both")
    if not panels:
        required, fix = f"numbers {', '.join(flags.y)} over values of {x} that differ", "measure more, or give --x, --y"
        refuse(", ".join(flags.records), f"{len(records)} records", required, "there is nothing to draw", fix)
    for file in save(panels, x, Path(flags.records[0]).stem, Path(flags.figures)):
        print(f"  {file}")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
