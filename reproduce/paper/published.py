"""What the reference system published (published.json): speedups, acceptance, ratios of costs, and their formula."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.auto.costs import tokens_per_round
from cost_model.published import same_context

SELF = "self"
Record = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """The contents of published.json. A published number is the `value` of a record, whose other keys are those of a
    run's: its setting. What is null or absent there was not said, or does not matter.

    speedup_tables, figure_6: speedups over plain decoding; their `origin` is the table's machine, or the figure.
    acceptance: the share of verified positions that are accepted. ratios: a verification or a draft step (their `kind`)
    over a step of plain decoding. checkpoint_names: what published models are called where they are downloaded."""

    about: dict[str, Any]
    draft_budget: int
    checkpoint_names: dict[str, list[str]]
    speedup_tables: list[Record]
    acceptance: list[Record]
    figure_6: list[Record]
    ratios: list[Record]

    @property
    def speedups(self) -> list[Record]:
        return [*self.speedup_tables, *self.figure_6]

    @property
    def setting(self) -> str:
        """What all published measurements have in common, for a caption."""
        common = "{system} ({paper}), {dataset}, tensor parallel over {tensor_parallel} GPUs".format_map(self.about)
        return f"{common}, draft budget {self.draft_budget}"


@cache
def published() -> Published:
    return Published(**json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


def target_name(record: Record) -> str:
    """The published name of the record's model, where it is a published one, else its own."""
    model = str(record.get("model"))
    own, names = model.rpartition("/")[2].casefold(), published().checkpoint_names.items()
    return next((name for name, known in names if own in map(str.casefold, (name, *known))), model)


def draft_name(record: Record) -> str:
    """ "self", or the name of the draft model, as published where it is."""
    return target_name({"model": record["draft_model"]}) if record.get("draft_model") else SELF


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """The records of each key, in the order of their first ones."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def pairs_of(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    return grouped(records, lambda record: (target_name(record), draft_name(record)))


def is_of(fact: Record, record: Record) -> bool:
    """Whether the record is of a published number's model and setting."""
    return target_name(record) == target_name(fact) and is_setting_of(fact, record)


def is_setting_of(fact: Record, record: Record) -> bool:
    """Whether the record is of a published number's setting, whatever its target model."""
    said = [name for name in ("B", "gamma", "draft_budget", "draft_policy") if fact.get(name) is not None]
    is_near = same_context(record["prefix_len"], fact["prefix_len"])
    return is_near and draft_name(record) == draft_name(fact) and all(record.get(name) == fact[name] for name in said)


def speedup(alpha: float, gamma: int, draft_over_target: float, verify_over_target: float) -> float:
    """Omega / (gamma * T_D / T_T + T_V / T_T), of draft, verification and plain steps: MagicDec (arXiv 2408.11049)."""
    return tokens_per_round(alpha, gamma) / (gamma * draft_over_target + verify_over_target)
