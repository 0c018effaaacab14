"""The names of dtypes, weight schemes, cache entries and attention backends on a command line."""

import re
from typing import Literal, get_args

from common.errors import refuse

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
KVDtype = Literal["int8", "fp8"]
Scheme = Literal["int8", "int4"]
Backend = Literal["auto", "torch", "cpp", "triton", "flash"]

SCHEMES = get_args(Scheme)
BACKENDS = get_args(Backend)


def parse_layers(text: str, flag: str = "--drop_layers") -> list[int]:
    """Return the layer indices of a list such as "3,7,13-15" (both ends included). Raises ConfigError."""
    layers: set[int] = set()
    for item in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if first > last:
            refuse(flag, repr(text), "a list of indices and ascending ranges, such as 3,7,13-15")
        layers.update(range(first, last + 1))
    return sorted(layers)
