"""What the reference system published (published.json): speedups, acceptance, ratios of costs, and their formula."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import ConfigError
from engine.cost_model.costs import tokens_per_round

FILE = Path(__file__).resolve().parent / "published.json"
SELF = "self"
TEXTS = ("system", "paper", "source", "dataset", "draft_policy", "formula")
# Contexts within this share of each other are the same setting: 8000 and 8192 tokens, say.
SAME_CONTEXT = 0.03


@dataclass(frozen=True)
class Speedup:
    """Tokens per second of speculation over those of plain decoding, at `context` prompt tokens and `B` rows.

    draft: "self", or the name of the draft model. gamma: None where none was shown.
    """

    machine: str
    target: str
    draft: str
    context: int
    B: int
    gamma: int | None
    speedup: float


@dataclass(frozen=True)
class Acceptance:
    """Share of the drafted tokens that are accepted."""

    target: str
    draft: str
    context: int
    alpha: float


@dataclass(frozen=True)
class Ratio:
    """Of one step of plain decoding: what a verification ("verify"), or one draft step ("draft"), costs."""

    kind: str
    target: str
    gamma: int | None
    budget: int | None
    context: int
    B: int
    ratio: float


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
    speedup_tables: tuple[Speedup, ...]
    acceptance: tuple[Acceptance, ...]
    figure_6: tuple[Speedup, ...]
    ratios: tuple[Ratio, ...]

    @property
    def machines(self) -> tuple[str, ...]:
        """Those of the speedup tables, in their order."""
        return tuple(dict.fromkeys(row.machine for row in self.speedup_tables))

    @property
    def setting(self) -> str:
        """What all published measurements have in common, for a caption."""
        return (
            f"{self.system} ({self.paper}), {self.dataset}, tensor parallel over {self.tensor_parallel} GPUs, "
            f"draft budget {self.draft_budget}"
        )

    def alpha(self, target: str, draft: str, context: int) -> float | None:
        """The acceptance published for this context, None if there is none."""
        for row in self.acceptance:
            if (row.target, row.draft) == (target, draft) and same_context(row.context, context):
                return row.alpha
        return None

    def is_model(self, name: str, recorded: str | None) -> bool:
        """Whether `recorded`, a model of a record, is the published model `name`."""
        own = (recorded or "").rpartition("/")[2].casefold()
        return own in (known.casefold() for known in (name, *self.checkpoint_names.get(name, ())))


@cache
def published() -> Published:
    """The facts in published.json."""
    facts = json.loads(FILE.read_text(encoding="utf-8"))
    return Published(
        **{key: facts[key] for key in TEXTS},
        tensor_parallel=facts["tensor_parallel"],
        draft_budget=facts["draft_budget"],
        notes=facts["notes"],
        checkpoint_names={model: tuple(known) for model, known in facts["checkpoint_names"].items()},
        speedup_tables=tuple(Speedup(**row) for row in facts["speedup_tables"]),
        acceptance=tuple(Acceptance(**row) for row in facts["acceptance"]),
        figure_6=tuple(Speedup(**row) for row in facts["figure_6"]),
        ratios=tuple(Ratio(**row) for row in facts["ratios"]),
    )


def same_context(a: int, b: int) -> bool:
    return abs(a - b) <= SAME_CONTEXT * max(a, b)


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
