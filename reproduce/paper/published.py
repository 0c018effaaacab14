"""What the reference system published (published.json): speedups, acceptance, ratios of costs, and their formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from engine.cost_model.costs import tokens_per_round

FILE = Path(__file__).resolve().parent / "published.json"
SELF = "self"
TEXTS = ("system", "paper", "source", "dataset", "tensor_parallel", "draft_policy", "draft_budget", "formula", "notes")
# Contexts within this share of each other are the same setting: 8000 and 8192 tokens, say.
SAME_CONTEXT = 0.03
Record = dict[str, Any]


@dataclass(frozen=True)
class Fact:
    """One published number, and its setting; what is None was not said, or does not matter.

    what: "table" and "figure 6" are speedups over plain decoding, "acceptance" is the share of verified positions that
    are accepted, "verify" and "draft" are a verification and a draft step over a step of plain decoding.
    draft: "self", or the name of the draft model. context: prompt tokens. B: rows.
    """

    what: str
    value: float
    target: str
    context: int
    machine: str | None = None
    draft: str = SELF
    B: int | None = None
    gamma: int | None = None
    budget: int | None = None

    @property
    def origin(self) -> str | None:
        """Where it was published: which machine's table, or the figure."""
        return f"{self.what}, {self.machine}" if self.what == "figure 6" else self.machine

    @property
    def record(self) -> Record:
        """Its setting, as a record of a run has it that measured nothing."""
        draft = {"draft_model": None if self.draft == SELF else self.draft, "draft_policy": published().draft_policy}
        size = {"prefix_len": self.context, "B": self.B, "gamma": self.gamma, "draft_budget": self.budget}
        return {"model": self.target, **draft, **size}

    def is_of(self, record: Mapping[str, Any]) -> bool:
        """Whether the record is of this model in this setting."""
        return published().is_model(self.target, record.get("model")) and self.is_setting_of(record)

    def is_setting_of(self, record: Mapping[str, Any]) -> bool:
        """Whether the record is of this setting, whatever its target model."""
        return (
            draft_name(record) == self.draft
            and (self.what != "acceptance" or record.get("draft_policy") == published().draft_policy)
            and same_context(record["prefix_len"], self.context)
            and self.B in (None, record["B"])
            and self.gamma in (None, record["gamma"])
            and self.budget in (None, record.get("draft_budget"))
        )


@dataclass(frozen=True)
class Published:
    """All published numbers. checkpoint_names: what the published models are called where they are downloaded."""

    system: str
    paper: str
    source: str
    dataset: str
    tensor_parallel: int
    draft_policy: str
    draft_budget: int
    formula: str
    notes: dict[str, str]
    checkpoint_names: dict[str, tuple[str, ...]]
    speedup_tables: tuple[Fact, ...]
    acceptance: tuple[Fact, ...]
    figure_6: tuple[Fact, ...]
    ratios: tuple[Fact, ...]

    @property
    def speedups(self) -> tuple[Fact, ...]:
        return *self.speedup_tables, *self.figure_6

    @property
    def setting(self) -> str:
        """What all published measurements have in common, for a caption."""
        return (
            f"{self.system} ({self.paper}), {self.dataset}, tensor parallel over {self.tensor_parallel} GPUs, "
            f"draft budget {self.draft_budget}"
        )

    def alpha(self, target: str, draft: str, context: int) -> float | None:
        """The acceptance published for this context, None if there is none."""
        for fact in self.acceptance:
            if (fact.target, fact.draft) == (target, draft) and same_context(fact.context, context):
                return fact.value
        return None

    def is_model(self, name: str, recorded: str | None) -> bool:
        """Whether `recorded`, a model of a record, is the published model `name`."""
        own = (recorded or "").rpartition("/")[2].casefold()
        return own in (known.casefold() for known in (name, *self.checkpoint_names.get(name, ())))


@cache
def published() -> Published:
    """The facts in published.json."""
    contents = json.loads(FILE.read_text(encoding="utf-8"))
    fixed = {"budget": contents["draft_budget"]}

    def facts(name: str, what: str, value: str, **setting: int) -> tuple[Fact, ...]:
        return tuple(
            Fact(**{"what": row.pop("kind", what), "value": row.pop(value)} | setting | row) for row in contents[name]
        )

    return Published(
        **{key: contents[key] for key in TEXTS},
        checkpoint_names={model: tuple(known) for model, known in contents["checkpoint_names"].items()},
        speedup_tables=facts("speedup_tables", "table", "speedup", **fixed),
        acceptance=facts("acceptance", "acceptance", "alpha", **fixed),
        figure_6=facts("figure_6", "figure 6", "speedup", **fixed),
        ratios=facts("ratios", "ratio", "ratio"),
    )


def same_context(a: int, b: int) -> bool:
    return abs(a - b) <= SAME_CONTEXT * max(a, b)


def target_name(record: Mapping[str, Any]) -> str:
    """The published name of the record's model, where it is a published one, else its own."""
    known = (name for name in published().checkpoint_names if published().is_model(name, record.get("model")))
    return next(known, str(record.get("model")))


def draft_name(record: Mapping[str, Any]) -> str:
    """ "self", or the name of the draft model, as published where it is."""
    return target_name({"model": record["draft_model"]}) if record.get("draft_model") else SELF


def speedup(alpha: float, gamma: int, draft_over_target: float, verify_over_target: float) -> float:
    """Omega / (gamma * T_D / T_T + T_V / T_T): MagicDec (arXiv 2408.11049), its formula for the speedup.

    T_T, T_D and T_V: one step of plain decoding, one draft step, one verification. Errors: ConfigError.
    """
    cost = gamma * draft_over_target + verify_over_target
    if cost <= 0:
        raise ConfigError(
            "a round that takes no time has no speedup",
            where="speedup: draft_over_target, verify_over_target",
            seen=f"{draft_over_target}, {verify_over_target}",
            required="a cost above 0",
            fix="divide measured step times by that of plain decoding",
        )
    return tokens_per_round(alpha, gamma) / cost
