"""The one place for matplotlib: a common style, and files that are the same bytes whenever the numbers are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Okabe and Ito's palette, without its yellow, which is lost on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
CATEGORIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
# viridis up to 0.9 of its range, dark to light: also without colour vision the order can be seen.
SHADES = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
MARKERS = "osD^vP"
PANEL_INCHES, LEGEND_LINE_INCHES, PAD_INCHES = (5.0, 3.6), 0.145, 0.08
# What is published lies above what is measured, and is larger, so that neither hides the other.
PUBLISHED = {"linestyle": "--", "linewidth": 0.9, "markersize": 6.5, "markerfacecolor": "none", "zorder": 4}
MEASURED = {"linestyle": "-", "linewidth": 1.4, "markersize": 4.5, "zorder": 3}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "figure.dpi": 130,
    "figure.constrained_layout.w_pad": PAD_INCHES,
    "figure.constrained_layout.h_pad": PAD_INCHES,
    "svg.hashsalt": "foretoken",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Series:
    """Points that belong together: open markers on a dashed line where they are published, else filled ones."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    is_published: bool = False
    marker: str = "o"
    names: Sequence[str] = ()  # one for each point, written beside it
    has_line: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes, labelled with units. reference: a horizontal line, and what is written on it.

    x_names: what stands at 0, 1, 2 ... of a horizontal axis that has names instead of numbers.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = True
    reference: tuple[float, str] | None = None
    x_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    title: str
    panels: tuple[Panel, ...]


def lines(
    rows: Iterable[Any],
    label: Callable[[Any], str],
    x: Callable[[Any], float | None],
    y: Callable[[Any], float | None],
    colour: Callable[[Any], str] | None = None,
    marker: Callable[[Any], str] | str | None = None,
    name: Callable[[Any], str] | None = None,
    **style: Any,
) -> list[Series]:
    """A series for each label, of the rows that have both numbers, by x; in the colour and with the marker of its first
    row, or, where none is given, with those of its place among the series. name: what is written beside a row's point.
    """
    groups: dict[str, list[tuple[float, float, Any]]] = {}
    for row in rows:
        at, height = x(row), y(row)
        if at is not None and height is not None:
            groups.setdefault(label(row), []).append((at, height, row))
    found = []
    for place, (title, group) in enumerate(groups.items()):
        xs, ys, members = zip(*sorted(group, key=itemgetter(0)), strict=True)
        own_colour = colour(members[0]) if colour else CATEGORIES[place % len(CATEGORIES)]
        own_marker = marker(members[0]) if callable(marker) else marker or MARKERS[place % len(MARKERS)]
        names = tuple(map(name, members)) if name else ()
        found.append(Series(title, xs, ys, own_colour, marker=own_marker, names=names, **style))
    return found


def shades(values: Iterable[float]) -> dict[float, str]:
    """A colour for each of these, dark to light in their order."""
    ordered = sorted(set(values))
    step = (len(SHADES) - 1) / max(1, len(ordered) - 1)
    return {value: SHADES[round(place * step)] for place, value in enumerate(ordered)}


def require_matplotlib() -> Any:
    """The package. Errors: ConfigError if it is not installed, so that this is known before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "figures are drawn with matplotlib, which is not installed",
            where=f"the Python environment {Path(sys.prefix).name}",
            seen=str(error),
            required="matplotlib",
            fix="pip install -r requirements-dev.txt, or: pip install matplotlib",
        ) from error
    return matplotlib


def save(figure: Figure, name: str, folder: Path) -> list[Path]:
    """Draw to folder/name.png and folder/name.svg. Errors: ConfigError if they cannot be drawn or written."""
    matplotlib = require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context(STYLE):
        width, height = PANEL_INCHES
        height += LEGEND_LINE_INCHES * max(
            sum(1 + series.label.count("\n") for series in panel.series) for panel in figure.panels
        )
        canvas = Canvas(figsize=(width * len(figure.panels), height), layout="constrained")
        FigureCanvasAgg(canvas)
        canvas.suptitle(figure.title, fontsize=10)
        for axes, panel in zip(canvas.subplots(1, len(figure.panels), squeeze=False)[0], figure.panels, strict=True):
            _draw(axes, panel)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Neither a date nor a version: the same numbers give the same bytes.
            canvas.savefig(paths[0], bbox_inches="tight", metadata={"Software": None})
            canvas.savefig(paths[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
        except OSError as error:
            raise ConfigError(
                "a figure cannot be written",
                where="--figures",
                seen=f"{folder}: {error.strerror}",
                required="a folder that can be made and written to",
                fix="name another folder",
            ) from error
    return paths


def _draw(axes: Any, panel: Panel) -> None:
    for series in panel.series:
        points = sorted(zip(series.x, series.y, strict=True))
        line = {} if series.has_line else {"linestyle": "none"}
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker=series.marker,
            color=series.colour,
            label=series.label,
            **(PUBLISHED if series.is_published else MEASURED) | line,
        )
        for x, y, name in zip(series.x, series.y, series.names, strict=False):
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=6.5, color=series.colour)
    if panel.is_log_x:
        _log_ticks(axes, [x for series in panel.series for x in series.x])
    if panel.x_names:
        axes.set_xticks(range(len(panel.x_names)), panel.x_names)
    if panel.reference:
        height, text = panel.reference
        axes.axhline(height, color=BLACK, linewidth=0.8, linestyle=":")
        axes.annotate(text, (0.01, height), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _log_ticks(axes: Any, values: list[float]) -> None:
    """A logarithmic axis that names powers of two times the smallest value: sizes double, from row to row."""
    axes.set_xscale("log", base=2)
    if not values:
        return
    low, high = min(values), max(values)
    ticks = [low * 2**power for power in range(math.ceil(math.log2(high / low)) + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
