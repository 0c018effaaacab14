"""What a sweep runs: cells, the grids that they come from, and the choice among them."""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common.checkout import ROOT
from common.errors import ConfigError

FLAG_NAME = re.compile(r"[A-Za-z]\w*(-\w+)*")
KEY_PREFIX = re.compile(r"[0-9a-f]{1,16}")
TABLE = {"script": str, "flags": dict, "axes": dict, "skip": list}
EXAMPLE = "start from reproduce/grids/example.toml"


@dataclass(frozen=True)
class Cell:
    """One configuration: `script` is a path below the project's root (or an absolute one), `flags` its flags.

    True is a bare flag, None and False are left out, a list is several values behind one flag.
    Errors: ConfigError for a script that is not there, and for a name or value that cannot be a flag.
    """

    script: str
    flags: Mapping[str, object]

    def __post_init__(self) -> None:
        path = (ROOT / self.script).resolve()
        if not path.is_file() or not (Path(self.script).is_absolute() or path.is_relative_to(ROOT)):
            required = f"a file below {ROOT}, or an absolute path"
            fix = "name it from the project's root, such as tests/selfspec_benchmark.py"
            raise ConfigError("the script is not there", "script", self.script or "nothing", required, fix)
        for name, value in self.flags.items():
            if not FLAG_NAME.fullmatch(name):
                required, fix = "letters, digits and _, without leading dashes", 'write "gamma" for --gamma'
                raise ConfigError("the name of a flag is none", self.script, repr(name), required, fix)
            if not is_value(value):
                what, where = "the value of a flag cannot be put on a command line", f"{self.script}: {name}"
                required = "a boolean, a finite number, a text, or a list of numbers and texts that is not empty"
                raise ConfigError(what, where, repr(value), required, "write it as a text")

    @property
    def given(self) -> dict[str, Any]:
        """The flags that are on the command line."""
        return {name: value for name, value in self.flags.items() if value is not None and value is not False}

    @property
    def key(self) -> str:
        """16 hexadecimal digits of what is run, whatever the order of the flags."""
        return hashlib.sha256(_canonical([self.script, self.given]).encode()).hexdigest()[:16]

    def label(self, without: Sequence[str] = (), show_script: bool = True) -> str:
        """The script and its flags, for people."""
        shown = {name: value for name, value in self.given.items() if name not in without}
        words = [name if value is True else f"{name}={value_text(value)}" for name, value in shown.items()]
        return " ".join([Path(self.script).stem, *words] if show_script or not words else words)

    def argv(self) -> list[str]:
        """The script and its arguments: `sys.argv` of the process that runs the cell, the script's path resolved."""
        arguments = [str(ROOT / self.script)]
        for name, value in self.given.items():
            values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
            texts = list(map(value_text, values))
            is_like_a_flag = len(texts) == 1 and texts[0].startswith("-")
            arguments += [f"--{name}={texts[0]}"] if is_like_a_flag else [f"--{name}", *texts]
        return arguments

    def text_of(self, name: str) -> str:
        """A flag's value as a text, false where the cell goes without it."""
        return value_text(self.given.get(name, False))


def is_value(value: object) -> bool:
    """Whether it can stand behind a flag."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(item, (int, float, str)) and is_value(item) for item in value)
    return value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def value_text(value: object) -> str:
    """A flag's value as it is written in TOML without quotes, and by people: true, 0.5, 64,128."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def labels(cells: Sequence[Cell]) -> list[str]:
    """Each cell's label without what all of them share."""
    shared = [name for name, values in varieties(cells).items() if len(values) == 1]
    return [cell.label(shared, show_script=len({cell.script for cell in cells}) > 1) for cell in cells]


def varieties(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Every flag's values over the cells, as texts."""
    names = dict.fromkeys(name for cell in cells for name in cell.given)
    return {name: list(dict.fromkeys(cell.text_of(name) for cell in cells)) for name in names}


def grid(script: str, fixed: Mapping[str, object], axes: Mapping[str, Sequence[object]]) -> list[Cell]:
    """A cell for every combination of the axes' values, the last axis varying fastest. Errors: ConfigError."""
    for name, values in axes.items():
        if not isinstance(values, (list, tuple)) or not values:
            where, fix = f"{script}: axis {name}", f"list the values of --{name}, or leave the axis out"
            raise ConfigError("an axis has no values", where, values, "a list of one value or more", fix)
        if name in fixed:
            where, fix = f"{script}: {name}", f"take {name} out of the fixed flags"
            seen = f"{value_text(fixed[name])}, and the axis {', '.join(map(value_text, values))}"
            raise ConfigError("a flag is fixed and an axis at once", where, seen, "one of the two", fix)
    return [Cell(script, {**fixed, **dict(zip(axes, point, strict=True))}) for point in product(*axes.values())]


def read_grid(path: str | Path) -> list[Cell]:
    """The cells of a TOML file, in its order. Errors: ConfigError naming the file and the table.

    Each table `[[sweep]]` has `script`, and may have `[sweep.flags]` (the same for all its cells), `[sweep.axes]`
    (a list of values per flag) and `skip`, a list of combinations of flags to leave out.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no TOML, or no UTF-8
        required = "a TOML file with tables [[sweep]]"
        raise ConfigError("the grid cannot be read", path, error, required, EXAMPLE) from None
    tables = content.get("sweep")
    are_tables = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if set(content) != {"sweep"} or not are_tables:
        seen, required = ", ".join(content) or "an empty file", "tables [[sweep]] and nothing else"
        raise ConfigError("the grid is not made of sweeps", path, seen, required, EXAMPLE)
    return [cell for n, table in enumerate(tables, 1) for cell in _cells_of_table(table, f"{path}: sweep {n}")]


def _cells_of_table(table: dict[str, Any], where: str) -> list[Cell]:
    wrong = [f"{name} = {value}" for name, value in table.items() if not isinstance(value, TABLE.get(name, ()))]
    if wrong or "script" not in table:
        required = 'script = "...", and optionally [sweep.flags], [sweep.axes] and skip = [{...}]'
        seen = wrong[0] if wrong else "no script"
        raise ConfigError("a sweep has other entries than it should", where, seen, required, EXAMPLE)
    cells = grid(table["script"], table.get("flags", {}), table.get("axes", {}))
    for point in table.get("skip", []):
        names, skipped = point if isinstance(point, dict) else (), _canonical(point)
        kept = [c for c in cells if not names or _canonical({name: c.flags.get(name) for name in names}) != skipped]
        if len(kept) == len(cells):
            what, fix = "a combination to leave out is in no cell", "correct it, or take it out"
            raise ConfigError(what, f"{where}: skip", point, "flags and values that cells of this sweep have", fix)
        cells = kept
    return cells


def select(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that match `only`, each `name=value` or the beginning of a key; all without any. Of one name any
    value may match, of several names each has to. Errors: ConfigError if none does, or if two of all cells are one.
    """
    first = {cell.key: cell for cell in reversed(cells)}
    for cell in cells:
        if first[cell.key] is not cell:
            fix = "leave one of them out, or give it a flag that tells them apart"
            raise ConfigError("the grid holds a cell twice", cell.script, cell.label(), "cells that differ", fix)
    prefixes = tuple(text for text in only if "=" not in text)
    names = {text.partition("=")[0] for text in only if "=" in text}
    chosen = [
        cell
        for cell in cells
        if (not prefixes or cell.key.startswith(prefixes))
        and all(name in cell.flags and f"{name}={cell.text_of(name)}" in only for name in names)
    ]
    if not chosen or not all(map(KEY_PREFIX.fullmatch, prefixes)):
        known = varieties(cells)
        axes = {name: values for name, values in known.items() if len(values) > 1} or known
        required = "; ".join(f"{name}={'|'.join(values)}" for name, values in axes.items()) or "a cell"
        fix = "choose among these values, or give the beginning of a key that --list shows"
        raise ConfigError("no cell matches", "--only", " ".join(only) or "no cells", required, fix)
    return chosen
