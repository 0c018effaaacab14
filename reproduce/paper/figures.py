"""The one place for matplotlib: a common style, and files that are the same bytes whenever the numbers are."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError
from kv_cache.policy import policies
from reproduce.paper.columns import TEXTS
from reproduce.paper.published import SELF, Record, draft_name, grouped, target_name

# Of the draft's cache, in the order of their colours.
POLICIES = (*dict.fromkeys(("full", "streaming", "snapkv", *policies())),)
# An entry of a record, or a function of it.
Key = str | Callable[[Record], Any]
# Keywords of matplotlib's `plot`.
Style = Mapping[str, Any]
# Okabe and Ito's palette, without its yellow, which is lost on white.
BLACK = "#000000"
CATEGORIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK)
# viridis up to 0.9 of its range, dark to light: also without colour vision the order can be seen.
SHADES = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
MARKERS = "osD^vP"
PANEL_INCHES, LEGEND_LINE_INCHES = (5.0, 3.6), 0.145
MOST_COLUMNS = 4
# What is published is open markers on a dashed line, what is measured is filled ones; the former lie above,
# and are larger, so that neither hides the other.
PUBLISHED = {"linestyle": "--", "linewidth": 0.9, "markersize": 6.5, "markerfacecolor": "none", "zorder": 4}
PUBLISHED |= {"marker": "o"}
MEASURED = {"linestyle": "-", "linewidth": 1.4, "markersize": 4.5, "zorder": 3}
POINTS = MEASURED | {"linestyle": "none"}
# Of the bars over one name together, where names are 1 apart.
BARS_WIDTH = 0.8
STYLE = Path(__file__).with_suffix(".mplstyle")


class Series(NamedTuple):
    """Points that belong together; bars where `x` is names. names: one for each point, written beside it."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    style: Style
    names: Sequence[str] = ()


class Panel(NamedTuple):
    """One pair of axes, labelled with units. is_speedup: with a line where plain decoding is."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log_x: bool = True
    is_speedup: bool = False


class Figure(NamedTuple):
    """Panels side by side, a few in a line; without any it says that nothing was measured."""

    title: str
    panels: Sequence[Panel]


def lines(
    rows: Iterable[Record],
    label: Key,
    x: Key,
    y: Key,
    look: Callable[[Record], Style] | None = None,
    name: Callable[[Record], str] | None = None,
    style: Style = MEASURED,
) -> list[Series]:
    """A series for each label, of the rows that have both numbers, by x; its colour and marker are those of its place
    among the series, unless `look` has others for its first row. name: what is written beside a row's point."""

    def value(row: Record, key: Key) -> Any:
        return key(row) if callable(key) else row.get(key)

    drawn = [row for row in rows if value(row, x) is not None and value(row, y) is not None]
    found = []
    for place, (title, group) in enumerate(grouped(drawn, lambda row: value(row, label)).items()):
        group.sort(key=lambda row: value(row, x))
        own = {"color": CATEGORIES[place % len(CATEGORIES)], "marker": MARKERS[place % len(MARKERS)], **style}
        own |= look(group[0]) if look else {}
        xs, ys = ([value(row, key) for row in group] for key in (x, y))
        found.append(Series(title, xs, ys, own, list(map(name, group)) if name else ()))
    return found


def diagonal(rows: Sequence[Record], *names: str) -> Series:
    """Where two numbers are the same, as far as these entries of the rows reach."""
    numbers = [row[name] for row in rows for name in names] or [1.0]
    ends = [min(numbers), max(numbers)]
    return Series("equal", ends, ends, MEASURED | {"color": "#999999"})


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
        what, where = "figures are drawn with matplotlib, which is not installed", Path(sys.prefix).name
        fix = "pip install -r requirements-dev.txt, or: pip install matplotlib"
        raise ConfigError(what, f"the Python environment {where}", error, "matplotlib", fix) from error
    return matplotlib


def save(figure: Figure, name: str, folder: Path) -> list[Path]:
    """Draw to folder/name.png and folder/name.svg. Errors: ConfigError if they cannot be drawn or written."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure as Canvas

    # Neither a date nor a version: the same numbers give the same bytes.
    panels = figure.panels or [Panel("nothing measured", "", "", [])]
    files = {folder / f"{name}.png": ["Software"], folder / f"{name}.svg": ["Date", "Creator"]}
    with matplotlib.rc_context(fname=STYLE):
        width, height = PANEL_INCHES
        legends = [sum(1 + series.label.count("\n") for series in panel.series) for panel in panels]
        n_column = min(len(panels), MOST_COLUMNS)
        n_line = math.ceil(len(panels) / n_column)
        size = width * n_column, n_line * (height + LEGEND_LINE_INCHES * max(legends))
        canvas = Canvas(figsize=size, layout="constrained")
        canvas.suptitle(figure.title, fontsize=10)
        places = canvas.subplots(n_line, n_column, squeeze=False).flatten()
        for axes, panel in zip(places, panels, strict=False):
            _draw(axes, panel)
        for axes in places[len(panels) :]:
            axes.remove()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, unsaid in files.items():
                canvas.savefig(path, bbox_inches="tight", metadata=dict.fromkeys(unsaid))
        except OSError as error:
            what, required = "a figure cannot be written", "a folder that can be made and written to"
            seen = f"{folder}: {error.strerror}"
            raise ConfigError(what, "--figures", seen, required, "name another folder") from error
    return list(files)


def _draw(axes: Any, panel: Panel) -> None:
    xs, ys = ([value for series in panel.series for value in getattr(series, of)] for of in ("x", "y"))
    names = [*dict.fromkeys(x for x in xs if isinstance(x, str))]
    for place, series in enumerate(panel.series):
        if names:
            width = BARS_WIDTH / len(panel.series)
            middles = [names.index(x) + (place + 0.5) * width - BARS_WIDTH / 2 for x in series.x]
            axes.bar(middles, series.y, width, label=series.label, color=series.style["color"])
            continue
        axes.plot(series.x, series.y, label=series.label, **series.style)
        for *point, name in zip(series.x, series.y, series.names, strict=False):
            look = {"fontsize": 6.5, "color": series.style["color"]}
            axes.annotate(name, point, textcoords="offset points", xytext=(4, 4), **look)
    if panel.is_log_x:
        axes.set_xscale("log", base=2)
    if panel.is_log_x and panel.series:  # named are powers of two times the smallest value: sizes double
        ticks = [min(xs) * 2**power for power in range(1 + math.ceil(math.log2(max(xs) / min(xs))))]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif names:
        axes.set_xticks(range(len(names)), names)
    elif all(isinstance(x, int) for x in xs):
        axes.locator_params(axis="x", integer=True)
    if all(isinstance(y, int) for y in ys):
        axes.locator_params(axis="y", integer=True)
    if panel.is_speedup:
        axes.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
        axes.annotate("plain decoding", (0.01, 1), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))


# A panel's title, published numbers, and of these records what stands beside them, which its label says.
Pair = tuple[str, Sequence[Record], Sequence[Record], Key, str]


def over_rows(title: str, pairs: Sequence[Pair]) -> Figure:
    """Over the rows decoded together: a line for each context and way to draft. What all share is said above."""
    colours = shades(row["prefix_len"] for _, facts, records, *_ in pairs for row in (*facts, *records))
    ways = [_way(record) for _, _, records, *_ in pairs for record in records]
    shared = [part for part, *others in zip(*ways, strict=True) if {part} >= {*others}]

    def colour(row: Record) -> Style:
        return {"color": colours[row["prefix_len"]]}

    def look(row: Record) -> Style:
        return colour(row) | {"marker": "o" if draft_name(row) == SELF else "s"}

    def name(record: Record) -> str:
        own = [part for part in _way(record) if part not in shared]
        return ", ".join(["measured", f"{record['prefix_len']} tokens", *own])

    panels, label = [], "published, {prefix_len} tokens".format_map
    for panel, facts, records, y, y_label in pairs:
        series = lines(facts, label, "B", "value", colour, style=PUBLISHED) + lines(records, name, "B", y, look)
        panels.append(Panel(panel, "rows decoded together", y_label, series, is_speedup=y_label == "speedup"))
    return Figure(title + (f"\nmeasured: {', '.join(shared)}" if shared else ""), panels)


def _way(record: Record) -> tuple[str, ...]:
    """The target, and how it is drafted for."""
    draft = f"{draft_name(record)} draft in {record.get('draft_weights') or record.get('draft_dtype')}"
    return target_name(record), draft, f"gamma {record['gamma']}", f"budget {record['draft_budget']}"


def by_budget(
    title: str, rows: Iterable[Record], panel: str, y_label: str, curves: Callable[[list[Record]], list[Series]]
) -> Figure:
    """Over the entries that a draft reads: a panel for each title that the text `panel` becomes with a row's fields."""
    panels = [
        Panel(name, "budget, KV entries read", y_label, curves(own), is_speedup=y_label == "speedup")
        for name, own in grouped(rows, panel.format_map).items()
    ]
    return Figure(title, panels)


def acceptance_curves(facts: Sequence[Record], rows: Sequence[Record], x: str) -> list[Series]:
    """What was published, and a line for each model, policy and text; a colour is a policy, a marker a text."""
    several = len({row["model"] for row in rows}) > 1

    def label(row: Record) -> str:
        return f"measured, {row['model'] + ', ' if several else ''}{row['draft_policy']}, {row['text']}"

    def look(row: Record) -> Style:
        return {"color": CATEGORIES[POLICIES.index(row["draft_policy"])], "marker": MARKERS[TEXTS.index(row["text"])]}

    of_known = "published, {model}, {draft_policy}".format_map
    known = lines(facts, of_known, x, "value", style=PUBLISHED | {"color": BLACK})
    return known + lines(rows, label, x, "acceptance_rate", look)
