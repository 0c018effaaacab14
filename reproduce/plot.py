"""Plots your own records over the setting that varies most, a line for each combination of the others.

    python reproduce/plot.py results.jsonl
    python reproduce/plot.py sweep.jsonl more.jsonl --x gamma --y acceptance_rate mean_accepted_length

Reads what the benchmarks append to --output, and the rows of sweeps. Of repeats the median is drawn; records without
one of the two numbers are left out, which is said.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Annotated, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from tyro.conf import Positional, arg

from common import cli
from common.errors import ConfigError
from common.jsonl import read_lines
from reproduce.paper import figures
from reproduce.paper.figures import Figure, Panel, lines
from reproduce.paper.published import Record
from reproduce.paper.reproduction import REPRODUCTION

DOUBLED = ("prefix_len", "B", "draft_budget", "gen_len")  # rather than counted up
AXES = (*DOUBLED, "gamma", "temperature")
SETTINGS = (
    *("benchmark", "model", "draft", "draft_model", "draft_policy", "draft_layers", "n_sink", "draft_dtype"),
    *("draft_weights", "draft_kv_dtype", "dataset", "verification", "top_k", "top_p", "dtype", "quantize", "kv_dtype"),
    *("attention", "compile", "tensor_parallel", "machine", "gpu", *AXES),
)
LABEL_WIDTH = 48
LARGEST = 1e15  # of what is drawn; infinity and NaN are not below it
MEASURED = ("speedup", "decode_tokens_per_second")


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"records": "RECORDS"}

    records: Positional[Annotated[tuple[str, ...], arg(metavar="RECORDS ...")]]
    """files of JSON lines"""
    x: Annotated[str | None, arg(help_behavior_hint="(default: the one with the most values)")] = None
    """the setting to draw over, such as prefix_len, B, draft_budget, gen_len, gamma or temperature"""
    y: tuple[str, ...] = MEASURED
    """what to draw"""
    figures: str = str(REPRODUCTION / "figures")
    """the folder for the figure, as PNG and SVG"""


def main(flags: Flags) -> None:
    draw(flags.records, flags.x, flags.y, Path(flags.figures))


def read_records(paths: Sequence[str]) -> list[Record]:
    """The files' records, empty ones of failed cells. Errors: ConfigError naming a file or line that has none."""
    records = []
    for path in paths:
        if not Path(path).is_file():
            raise _refuse("there is no such file of records", "RECORDS", path, "a file of JSON lines", "name another")
        for number, line in read_lines(path):
            record = line.get("record", line) if isinstance(line, dict) else line
            if not isinstance(record, dict) and not (record is None and isinstance(line, dict)):
                where, fix = f"{path}, line {number}", "name the file that a benchmark or sweep appended to"
                raise _refuse("a line is no record", where, str(line)[:80], "a JSON object", fix)
            records.append(record or {})
    return records


def most_varied(records: Sequence[Record]) -> str:
    """The axis with the most values. Errors: ConfigError if none has two."""
    counts = {axis: len({record[axis] for record in records if _is_number(record.get(axis))}) for axis in AXES}
    most = max(counts, key=lambda axis: counts[axis])
    if counts[most] < 2:
        seen, required = f"{len(records)} records with a number to draw", f"two values of one of {', '.join(AXES)}"
        raise _refuse("nothing varies", "RECORDS", seen, required, "measure more, or give --x")
    return most


def panel(records: Sequence[Record], x: str, y: str) -> Panel:
    """Median `y` over `x`, a line for each combination of the other settings that vary.

    Lines are named by as many settings as tell them apart.
    """
    varied: list[str] = []
    for name in SETTINGS:
        if name != x and _n_combinations(records, [*varied, name]) > _n_combinations(records, varied):
            varied.append(name)

    def label(record: Record) -> str:
        name = ", ".join(f"{name} {record[name]}" for name in varied if record.get(name) is not None) or "all"
        return fill(name.replace("$", "\\$"), LABEL_WIDTH)  # a dollar sign would begin a formula

    points: dict[tuple[str, float], list[float]] = {}
    for record in records:
        points.setdefault((label(record), record[x]), []).append(record[y])
    medians = [(*place, median(values)) for place, values in points.items()]
    series = tuple(lines(medians, itemgetter(0), itemgetter(1), itemgetter(2)))
    is_log = x in DOUBLED and min(record[x] for record in records) > 0
    reference = (1.0, "plain decoding") if y.endswith("speedup") else None
    return Panel(y, x, y, series, is_log_x=is_log, reference=reference)


def _n_combinations(records: Sequence[Record], names: Sequence[str]) -> int:
    return len({tuple(repr(record.get(name)) for name in names) for record in records})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _refuse(what: str, where: str, seen: object, required: str, fix: str) -> ConfigError:
    return ConfigError(what, where=where, seen=seen, required=required, fix=fix)


def draw(paths: Sequence[str], x: str | None, ys: Sequence[str], folder: Path) -> None:
    """A figure with a panel for each of `ys`, and what is in it said."""
    figures.require_matplotlib()
    records = read_records(paths)
    measured = [record for record in records if any(_is_number(record.get(y)) for y in ys)]
    x = x or most_varied(measured)
    drawn = {y: [one for one in measured if _is_number(one.get(y)) and _is_number(one.get(x))] for y in ys}
    panels = tuple(panel(kept, x, y) for y, kept in drawn.items() if kept)
    if not panels:
        required = f"numbers under {x} and one of {', '.join(ys)}"
        raise _refuse("no record can be drawn", "RECORDS", f"{len(records)} records", required, "name others: --x, --y")
    for y, kept in drawn.items():
        lacking = "; the others lack a number" if len(kept) < len(records) else ""
        print(f"  {y} over {x}: {len(kept)} of {len(records)} records{lacking}")
    name = Path(paths[0]).stem
    for path in figures.save(Figure(name, panels), name, folder):
        print(f"  {path}")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
