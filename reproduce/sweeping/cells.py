"""What a sweep runs: cells, the grids that they come from, and the choice among them."""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from common.checkout import ROOT
from common.errors import ConfigError

VALUES = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True)
class Cell:
    """One configuration: `script` is a path below the project's root (or an absolute one), `flags` its flags.

    True is a bare flag, None and False are left out, a list is several values behind one flag; what a value may be is
    the script's to say. Errors: ConfigError for a script that is not there, and for what cannot be a flag."""

    script: str
    flags: Mapping[str, object]

    def __post_init__(self) -> None:
        if not (ROOT / self.script).is_file():
            required, fix = f"a file below {ROOT}", "name it from there, such as tests/selfspec_benchmark.py"
            raise ConfigError("the script is not there", "script", self.script or "nothing", required, fix)
        for name, value in self.flags.items():
            if not name.replace("-", "_").isidentifier() or name.startswith("-") or not isinstance(value, VALUES):
                what, required = "this cannot be a flag", "a name without dashes before it, and a value or a list"
                raise ConfigError(what, self.script, f"{name} = {value}", required, 'write "gamma = 3" for --gamma 3')

    @property
    def given(self) -> dict[str, Any]:
        """The flags that are on the command line.

        A benchmark that samples gets `verification = "coupled"` unless the cell names a mode: cells of the same prompts
        then decode the same text, so that drafts can be compared. Other scripts that compare drafts do so themselves.
        """
        given = {name: value for name, value in self.flags.items() if value is not None and value is not False}
        if self.script.endswith("_benchmark.py") and _is_positive(given.get("temperature", 0)):
            return {"verification": "coupled"} | given
        return given

    @property
    def key(self) -> str:
        """16 hexadecimal digits of what is run, whatever the order of the flags."""
        said = json.dumps([self.script, self.given], sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

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
        """False where the cell goes without it."""
        return value_text(self.given.get(name, False))


def value_text(value: object) -> str:
    """A flag's value as it is written in TOML without quotes, and by people: true, 0.5, 64,128."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_positive(value: object) -> bool:
    try:
        return float(value_text(value)) > 0
    except ValueError:  # the script says what is wrong with it
        return False


def labels(cells: Sequence[Cell]) -> list[str]:
    """Each cell's script and flags, for people, without what all of them share."""
    shared = [name for name, values in varieties(cells).items() if len(values) == 1]
    found, several = [], len({cell.script for cell in cells}) > 1
    for cell in cells:
        shown = {name: value for name, value in cell.given.items() if name not in shared}
        words = [name if value is True else f"{name}={value_text(value)}" for name, value in shown.items()]
        found.append(" ".join([Path(cell.script).stem, *words] if several or not words else words))
    return found


def varieties(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Every flag's values over the cells, as texts."""
    names = dict.fromkeys(name for cell in cells for name in cell.given)
    return {name: list(dict.fromkeys(cell.text_of(name) for cell in cells)) for name in names}


@dataclass(frozen=True)
class Sweep:
    """A table [[sweep]] of a file. flags: the same for all its cells. axes: lists of values, the last vary fastest."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    script: str
    flags: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """One for every combination of the axes' values. Errors: ConfigError."""
        for name, values in self.axes.items():
            if not values or name in self.flags:
                own = self.flags.get(name)
                seen = f"{value_text(own)}, and the axis {value_text(values)}" if name in self.flags else values
                required = "a list of one value or more, of a flag that is not among the fixed ones"
                fix = f"list the values of --{name}, or leave out one of the two"
                raise ConfigError("an axis is none", f"{self.script}: {name}", seen, required, fix)
        points = product(*self.axes.values())
        return [Cell(self.script, {**self.flags, **dict(zip(self.axes, point, strict=True))}) for point in points]


def read_grid(path: str | Path) -> list[Sweep]:
    """The tables `[[sweep]]` of a TOML file. Errors: ConfigError."""
    required = 'a TOML file of tables [[sweep]]: script = "...", and optionally [sweep.flags] and [sweep.axes]'
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return TypeAdapter(dict[Literal["sweep"], list[Sweep]]).validate_python(content).get("sweep", [])
    except (OSError, ValueError) as error:  # also of what is no TOML, no UTF-8, or not made of sweeps
        wrong = error.errors() if isinstance(error, ValidationError) else []
        seen = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in wrong) or error
        fix = "start from reproduce/grids/example.toml"
        raise ConfigError("the grid cannot be read", path, seen, required, fix) from None


def cells_of(sweeps: Sequence[Sweep], fixed: Mapping[str, Any], axes: Mapping[str, Any]) -> list[Cell]:
    """fixed, axes: stand in the place of a sweep's own; what no sweep has is every one's. Errors: ConfigError."""
    names = [{*sweep.flags, *sweep.axes} for sweep in sweeps]
    found = []
    for sweep, own in zip(sweeps, names, strict=True):
        here = {name for name in (*fixed, *axes) if name in own or not any(name in others for others in names)}
        flags, ranges = (
            {name: value for name, value in said.items() if name not in here}
            | {name: value for name, value in given.items() if name in here}
            for said, given in ((sweep.flags, fixed), (sweep.axes, axes))
        )
        found += Sweep(sweep.script, flags, ranges).cells()
    return found


def select(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that match `only`, each `name=value` or the beginning of a key; all without any; each once. Of one name
    any value may match, of several names each has to. Errors: ConfigError if none does."""
    cells = list({cell.key: cell for cell in cells}.values())
    prefixes = tuple(text for text in only if "=" not in text)
    names = {text.partition("=")[0] for text in only if "=" in text}
    chosen = [
        cell
        for cell in cells
        if (not prefixes or cell.key.startswith(prefixes))
        and all(name in cell.flags and f"{name}={cell.text_of(name)}" in only for name in names)
    ]
    if not chosen or "" in prefixes:
        required = "; ".join(f"{name}={'|'.join(values)}" for name, values in varieties(cells).items() if values[1:])
        fix = "choose among these values, or give the beginning of a key that --list shows"
        raise ConfigError("no cell matches", "--only", " ".join(only) or "no cells", required or "its key", fix)
    return chosen
