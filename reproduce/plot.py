"""Plot records over the setting that varies most, with a line for each combination of the other settings.

    python -m reproduce.plot results.jsonl
    python -m reproduce.plot sweep.jsonl more.jsonl --x gamma --y acceptance_rate mean_accepted_length
    python -m reproduce.plot policies.jsonl --x draft_budget --y speedup --where text=sampled --facet prefix_len
    python -m reproduce.plot long.jsonl --x generated_tokens    # the stretches of runs with --by_length

Reads what benchmarks and reproduce/compare.py append to --output, and sweeps. A point is a median over repeats. Bars
are the range of repeats, or a 95% interval over rows of rates that were measured once. What has no value on the x axis,
such as a draft without a budget, is a level with a band. A y axis begins at zero, or has a mark where it is broken.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from tyro.conf import Positional, arg

from common import cli
from common.checkout import ROOT
from common.errors import DataError, refuse
from common.flags import Given
from reproduce.helpers.columns import drafter_text
from reproduce.helpers.pairs import RATES, interval
from reproduce.helpers.records import AXES, Record, grouped, read_records, refuse_column, rows_of, selected, varying

DOUBLED = AXES[:4]  # drawn on a logarithmic axis
GENERATED = "generated_tokens"  # where a stretch of --by_length ends
MEASURED = ("speedup", "decode_tokens_per_second", "acceptance_rate")
# Twelve colours that also differ for the colour-blind: Okabe and Ito's without yellow, which is lost on white, and five
# of Tol's muted ones. Markers tell them apart in print.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#000000", "#882255", "#999933", "#332288", "#AA4499", "#7F7F7F"),
)
MARKERS, PANEL_INCHES, LEGEND_INCHES = "osD^vP*X<>hd", (3.4, 2.7), 0.2
FORMATS = ("pdf", "svg", "png")
# An axis is broken if no value is below this share of the largest.
BROKEN_ABOVE = 0.5
BARS = "bars, and bands of levels: range of repeats, or 95% interval over rows"
FIGURES = str(ROOT / "reproduction" / "figures")


@dataclass(frozen=True)
class Flags:
    records: Positional[tuple[str, ...]]  # files of JSON lines
    x: Given[str] = None  # number to draw over, such as prefix_len or gamma; by default the setting that varies most
    y: tuple[str, ...] = MEASURED  # numbers to draw, each in a row of panels
    where: tuple[str, ...] = ()  # NAME=V1,V2: rows to draw; none stands for what a row lacks
    lines: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all that vary)")] = ()
    """settings that tell lines apart; others count as repeats"""
    facet: str | None = None  # setting with a column of panels for each value
    figures: Annotated[str, arg(aliases=["--output"])] = FIGURES  # folder for the figure, or a file such as figure.svg


class Point(NamedTuple):
    x: float | None
    y: float
    low: float
    high: float


Lines = Mapping[str, Sequence[Point]]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def choose_x(records: Sequence[Record]) -> str:
    """Return the number that has most values."""
    return max(AXES, key=lambda name: len({record.get(name) for record in records}))


def point_of(x: float | None, rows: Sequence[Record], y: str) -> Point:
    """Return the median of rows, and its bar: the range of all repeats, or a 95% interval over the rows of a text."""
    value = median(row[y] for row in rows)
    lists = {"speedup": "speedups"}  # with a value for each repeat
    repeats = [each for row in rows for each in row.get(lists.get(y, "")) or [row[y]]]
    if len(repeats) == 1 and y in RATES and (found := interval(rows[0], name=y)):
        return Point(x, value, found.low, found.high)
    return Point(x, value, min(repeats), max(repeats))


def lines_of(records: Sequence[Record], x: str, y: str, varied: Sequence[str]) -> Lines:
    """Return the points of each line by its label."""

    def label(record: Record) -> str:
        values = {name: record[name] for name in varied if record.get(name) is not None}
        if "drafter" in values:
            values["drafter"] = drafter_text(record)
        named = [f"{name} {value}" if len(varied) > 1 else str(value) for name, value in values.items()]
        return ", ".join(named) or "all"

    lines: Lines = {}
    groups = grouped(records, lambda row: (row.get(x) is None, label(row))).items()
    for (has_no_x, name), line in sorted(groups, key=lambda group: group[0][0]):
        points = sorted(point_of(value, rows, y) for value, rows in grouped(line, lambda row: row.get(x)).items())
        lines[f"{name}, no {x}" if has_no_x and name in lines else name] = points
    return lines


def draw(axes: Any, lines: Lines, labels: Sequence[str], x: str, y: str) -> None:
    """Draw a panel. labels: of the lines of all panels, by which lines look alike everywhere."""
    for label, line in lines.items():
        place, style = labels.index(label), ("-", "--", ":")[labels.index(label) // len(COLOURS) % 3]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "linestyle": style}
        if line[0].x is None:
            axes.axhline(line[0].y, label=label, color=look["color"], linewidth=1.2, linestyle="-.")
            axes.axhspan(line[0].low, line[0].high, color=look["color"], alpha=0.12, linewidth=0)
            continue
        bars = [[p.y - p.low for p in line], [p.high - p.y for p in line]]
        xs, ys = [p.x for p in line], [p.y for p in line]
        axes.errorbar(xs, ys, bars, label=label, markersize=4, linewidth=1.2, elinewidth=0.8, capsize=2, **look)
    values = sorted({p.x for line in lines.values() for p in line if p.x is not None})
    if x in DOUBLED and values[:1] > [0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    if y.endswith("speedup"):
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.grid(alpha=0.3)


def set_limits(row: Sequence[Any]) -> None:
    """Let the axis that a row of panels shares begin at zero or, if all values are far from zero, mark its break."""
    low, high = min(axes.dataLim.ymin for axes in row), row[0].get_ylim()[1]
    if low <= BROKEN_ABOVE * high:
        row[0].set_ylim(bottom=min(0, low))
        return
    mark = {"marker": [(-1, -0.5), (1, 0.5)], "markersize": 9, "linestyle": "none", "color": "black"}
    for axes in row:
        axes.plot([0, 0], [0.015, 0.045], transform=axes.transAxes, clip_on=False, **mark)


def save(panels: Mapping[str, Mapping[Any, Lines]], x: str, facet: str | None, files: Sequence[Path]) -> None:
    """Draw a row of panels for each number and a column for each facet, with one legend. Errors: ConfigError."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install -r requirements-dev.txt, or: pip install matplotlib"
        refuse("the Python environment", error, "matplotlib", "figures need matplotlib", fix)
    values = {value for by_facet in panels.values() for value in by_facet}
    columns = sorted(values, key=lambda value: (value is not None, isinstance(value, str), value))
    every = [lines for by_facet in panels.values() for lines in by_facet.values()]
    labels = [*dict.fromkeys(label for lines in every for label in lines)]
    width, height = PANEL_INCHES
    n_columns = max(1, int(width * len(columns) / (0.5 + 0.065 * max(map(len, labels)))))
    size = width * len(columns), height * len(panels) + LEGEND_INCHES * math.ceil(len(labels) / n_columns)
    # Text of an SVG stays text, and of a PDF becomes a font that can be edited; the files depend on the records alone.
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "foretoken", "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained", dpi=200)
        grid, handles = figure.subplots(len(panels), len(columns), sharey="row", squeeze=False), dict[str, Any]()
        for row, (y, by_facet) in zip(grid, panels.items(), strict=True):
            for axes, value in zip(row, columns, strict=True):
                draw(axes, by_facet[value], labels, x, y) if value in by_facet else axes.set_axis_off()
                handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
                axes.set_xlabel(x)
            row[0].set_ylabel(y)
            set_limits(row)
        for axes, value in zip(grid[0], columns, strict=True):
            axes.set_title(f"{facet} {value}" if facet else "")
        points = [p for lines in every for line in lines.values() for p in line]
        title = BARS if any(p.low < p.high for p in points) else None
        how = {"loc": "outside lower center", "ncols": n_columns, "frameon": False, "title": title}
        figure.legend(handles.values(), handles, **how)
        try:
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file.suffix[1:])
                figure.savefig(file, bbox_inches="tight", metadata=dated)
        except OSError as error:
            refuse("figures", error, "a place that can be written", "a figure cannot be written", "name another place")


def main(flags: Flags) -> None:
    records = [record for path in flags.records for record in read_records(path)]
    rows = rows_of(records, "by_length" if flags.x == GENERATED else "rows")
    rows = selected([row | {GENERATED: row.get("generated", [None])[-1]} for row in rows], flags.where)
    named = {"x": (flags.x,), "facet": (flags.facet,), "lines": flags.lines}
    for field, names in (named | {"y": flags.y if flags.y != MEASURED else ()}).items():
        for name in filter(None, names):
            if not any(name in row for row in rows):
                refuse_column(field, name, rows)
    measured = [row for row in rows if any(is_number(row.get(y)) for y in flags.y)]
    x, panels = flags.x or choose_x(measured or rows), dict[str, dict[Any, Lines]]()
    varied = flags.lines or varying(measured, x, *filter(None, [flags.facet]))
    for y in flags.y:
        drawn = [row for row in measured if is_number(row.get(y)) and (row.get(x) is None or is_number(row[x]))]
        values = {row[x] for row in drawn if row.get(x) is not None}
        if len(values) > (0 if flags.x else 1):
            by_facet = grouped(drawn, lambda row: row.get(flags.facet)).items()
            panels[y] = {value: lines_of(each, x, y, varied) for value, each in by_facet}
            print(f"  {y} over {x}: {len(drawn)} of {len(rows)} rows")
    if not panels:
        numbers = {name for row in rows for name, value in row.items() if is_number(value)}
        known = [name for name in dict.fromkeys([*AXES, *MEASURED, x, *flags.y]) if name in numbers]
        lacking = [name for name in (x, *flags.y) if name not in known]
        seen = f"no {', no '.join(lacking)}" if lacking else f"a single {x}"
        required, fix = f"numbers over values of {x} that differ", f"give --x and --y among {', '.join(known)}"
        refuse(", ".join(flags.records), seen, required, "there is nothing to draw", fix, DataError)
    if lacking := [y for y in flags.y if y not in panels]:
        print(f"  there is nothing to draw of {', '.join(lacking)}")
    # Figures of other flags have other names.
    given = [flags.x, *(flags.y if flags.y != MEASURED else ()), *flags.where, flags.facet, *flags.lines]
    stem = "-".join([*(Path(path).stem for path in flags.records), *filter(None, given)])
    to, name = Path(flags.figures), re.sub(r"[^\w.=,-]", "_", stem)[:200]
    files = [to] if to.suffix[1:] in FORMATS else [to / f"{name}.{kind}" for kind in FORMATS]
    save(panels, x, flags.facet, files)
    for file in files:
        print(f"  {file}")


if __name__ == "__main__":
    cli.run(main, Flags)
