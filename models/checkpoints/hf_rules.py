"""How a key of a Hugging Face config.json is checked: the accepted values, and the error for others."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.config import FIX, unsupported

MAX_SIZE = 1 << 31
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The accepted values of a key, and how an error describes them."""

    required: str
    accepts: Callable[[Any], bool]


def only(*values: Any) -> Rule:
    """Accept exactly these values: 0 is not false, and 1.0 is not 1."""
    kinds = [(type(value), value) for value in values]
    return Rule(" or ".join(["no such key", *map(json.dumps, values)]), lambda value: (type(value), value) in kinds)


def of_type(name: str, *types: type) -> Rule:
    """Accept values of these types; transformers reads other types differently, or not at all."""
    return Rule(name, lambda value: type(value) in types)


UNSET = only(None)
OBJECT = of_type("an object or null", dict, type(None))
STRING = of_type("a string", str)
INTEGER = of_type("an integer", int)
NUMBER = of_type("a number", int, float)
BOOLEAN = of_type("true or false", bool)


def check(values: Values, rules: Mapping[str, Rule], where: str) -> None:
    """Raise ConfigError for the first key whose value is not accepted."""
    for key, rule in rules.items():
        if key in values and not rule.accepts(values[key]):
            fix = f"{FIX}; leave out {key} if the model does not use it"
            what = f"{key} has a value that is not supported"
            unsupported(f"{where}: {key}", repr(values[key])[:200], rule.required, what, fix=fix)


def positive(values: Values, key: str, where: str, default: float | None = None, kind: type[float] = int) -> Any:
    """Return a positive size, or with `kind=float` a positive number; `default` if the key is absent or null. Raises
    ConfigError."""
    value = default if values.get(key) is None else values[key]
    end = MAX_SIZE if kind is int else sys.float_info.max
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not 0 < value < end:
        seen, name = "no such key" if value is None else repr(value), "an integer" if kind is int else "a number"
        unsupported(f"{where}: {key}", seen, f"{name} > 0 and < {end:g}")
    return kind(value)
