"""Plots your own records over the setting that varies most, a line for each combination of the others.

    python reproduce/plot.py results.jsonl
    python reproduce/plot.py sweep.jsonl more.jsonl --x gamma --y acceptance_rate mean_accepted_length

Reads what the benchmarks and reproduce/acceptance.py append to --output, and the rows of sweeps. Of repeats the median
is drawn; records without one of the two numbers are left out, which is said. Over a setting that is no number, such as
--x draft_policy, bars are drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

import bench
from common import cli
from common.errors import ConfigError
from common.jsonl import read_lines
from reproduce.paper import figures
from reproduce.paper.figures import Figure, Panel, lines
from reproduce.paper.published import Record, grouped
from reproduce.paper.reproduction import REPRODUCTION

DOUBLED = ("prefix_len", "B", "draft_budget", "gen_len")  # rather than counted up
AXES = (*DOUBLED, "gamma", "temperature")
SETTINGS = (
    *("benchmark", "model", "draft", "draft_model", "draft_policy", "text", "text_drafts", "draft_layers"),
    *("draft_dtype", "draft_weights", "draft_kv_dtype", "dataset", "verification", "top_k", "top_p", "dtype"),
    *("quantize", "kv_dtype", "attention", "compile", "tensor_parallel", "data_parallel", "machine", "gpu", *AXES),
)
# Options that older records have beside values of another, which follow it here, that leave them without effect.
IDLE = {"inner_gamma": ("draft_of_draft", None), "inner_budget": ("draft_of_draft", None, "ngram")}
IDLE |= {"text_match": ("text_drafts", None)}
LABEL_WIDTH = 48
LARGEST = 1e15  # of what is drawn; infinity and NaN are not below it
MEASURED = ("speedup", "decode_tokens_per_second", "acceptance_rate")


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"records": "RECORDS"}

    records: Positional[Annotated[tuple[str, ...], arg(metavar="RECORDS ...")]]  # files of JSON lines
    x: Annotated[str | None, arg(help_behavior_hint="(default: the one with the most values)")] = None
    """the setting to draw over, such as prefix_len, B, draft_budget, gen_len, gamma, temperature or draft_policy"""
    y: tuple[str, ...] = MEASURED  # what to draw
    figures: str = str(REPRODUCTION / "figures")  # the folder for the figure, as PNG and SVG


def main(flags: Flags) -> None:
    """A figure with a panel for each of the flags' `y`, and what is in it said."""
    figures.require_matplotlib()
    records = read_records(flags.records)
    named = [*([flags.x] if flags.x else []), *(flags.y if flags.y != MEASURED else [])]
    for name in named:
        if not any(name in record for record in records):
            required = ", ".join(sorted({key for record in records for key in record if _is_number(record[key])}))
            raise ConfigError("no record has this", "--x, --y", name, f"such as {required}", "check the spelling")
    measured = [record for record in records if any(_is_number(record.get(y)) for y in flags.y)]
    counts = {axis: len(_values(measured, axis)) for axis in (*AXES, *SETTINGS)}
    varied = [axis for axis in AXES if counts[axis] > 1] or SETTINGS
    x = flags.x or max(varied, key=counts.__getitem__)
    places = _values(measured, x)
    drawn = {y: [one for one in measured if _is_number(one.get(y)) and one.get(x) in places] for y in flags.y}
    panels = [panel(kept, x, y) for y, kept in drawn.items() if kept and (flags.x or counts[x] > 1)]
    if not panels:
        what, seen = "there is nothing to draw", f"{len(measured)} records with a number to draw"
        required = f"values that differ under {flags.x or ' or '.join(AXES)}"
        raise ConfigError(what, "RECORDS", seen, required, "measure more, or give --x, --y")
    for y, kept in drawn.items():
        print(f"  {y} over {x}: {len(kept)} of {len(records)} records have both")
    name = Path(flags.records[0]).stem
    for path in figures.save(Figure(name, panels), name, Path(flags.figures)):
        print(f"  {path}")


def read_records(paths: Sequence[str]) -> list[Record]:
    """The files' records, one for each of their rows if they have any, and empty ones of failed cells. Errors:
    ConfigError naming a file or line that has none."""
    records = []
    for path in paths:
        for number, line in read_lines(path) if Path(path).is_file() else [(0, "no such file")]:
            record = line.get("record", line) if isinstance(line, dict) else line
            if not isinstance(record, dict | None):
                where, fix = f"{path}, line {number}", "name the file that a benchmark or sweep appended to"
                raise ConfigError("this is no record", where, str(line)[:80], "a JSON object in each line", fix)
            record = record and record | bench.options_of(record)
            records += [record | row for row in record["rows"]] if record and "rows" in record else [record or {}]
    return records


def panel(records: Sequence[Record], x: str, y: str) -> Panel:
    """Median `y` over `x`, a line for each combination of the other settings that tell records apart."""
    varied: list[str] = []
    for name in dict.fromkeys([*SETTINGS, *bench.option_names()]):
        tells_more = _n_kinds(records, *varied, name) > _n_kinds(records, *varied)
        if name != x and tells_more and not _follows(records, name, x):
            varied.append(name)

    def line(record: Record) -> tuple[str, float | str]:
        said = [f"{name} {_setting(record, name)}" for name in varied if _setting(record, name) is not None]
        label = fill((", ".join(said) or "all").replace("$", "\\$"), LABEL_WIDTH)  # a dollar sign would begin a formula
        return label, record[x] if _is_number(record[x]) else str(record[x])

    points = grouped(records, line).items()
    medians = [{"label": label, x: at, y: median(one[y] for one in same)} for (label, at), same in points]
    is_log = x in DOUBLED and all(_is_number(record[x]) and record[x] > 0 for record in records)
    return Panel(y, x, y, lines(medians, "label", x, y), is_log_x=is_log, is_speedup=y.endswith("speedup"))


def _n_kinds(records: Sequence[Record], *names: str) -> int:
    return len({repr([_setting(record, name) for name in names]) for record in records})


def _follows(records: Sequence[Record], option: str, x: str) -> bool:
    """Whether `x` is names, such as policies, that either have this option or not, and each no more than one value."""
    is_of_some = not _is_number(records[0][x]) and any(_setting(record, option) is None for record in records)
    return is_of_some and _n_kinds(records, x, option) == _n_kinds(records, x)


def _setting(record: Record, name: str) -> Any:
    other, *idle = IDLE.get(name, (name,))
    return None if record.get(other) in idle else record.get(name)


def _values(records: Sequence[Record], name: str) -> list[Any]:
    """Return the numbers that this setting has in the records, or its names if it has no number."""
    given = {record[name] for record in records if isinstance(record.get(name), (int, float, str))}
    return [*filter(_is_number, given)] or [*given]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


if __name__ == "__main__":
    cli.run_alone(main, Flags)
