"""Saves costs in the user's cache folder, by everything that they depend on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.auto.costs import Costs
from common.errors import UserError
from common.jsonl import parse_json
from models.checkpoints.manifest import write_text
from models.kernels.build import cache_folder

Key = Mapping[str, Any]


def load_costs(key: Key) -> dict[int, list[Costs]] | None:
    """Return the costs that were stored under a key, by the number of rows; None if there are none."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):  # RuntimeError: a user without a home folder
        path = _path(key)
        kept = parse_json(path.read_text(encoding="utf-8") if path.is_file() else "{}")
        if kept["key"] == json.loads(json.dumps(key)):  # where tuples are lists
            return {int(n_rows): [*map(_costs, costs)] for n_rows, costs in kept["costs"].items()}
    return None


def store_costs(key: Key, costs: Mapping[int, Sequence[Costs]]) -> None:
    """Store costs for later runs, without the acceptance, which depends on the text. Does nothing if the folder cannot
    be written."""
    kept = {n_rows: [asdict(cost) | {"acceptance": None} for cost in each] for n_rows, each in costs.items()}
    with suppress(UserError, RuntimeError):
        write_text(_path(key), json.dumps({"key": key, "costs": kept}))


def _costs(kept: dict[str, Any]) -> Costs:
    return Costs(**kept | {"at": tuple(kept["at"]), "verify_ms": tuple(kept["verify_ms"])})


def _path(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "costs" / f"{digest[:32]}.json"
