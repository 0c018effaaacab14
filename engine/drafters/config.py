"""What every drafter's options share, and how drafters are found: each has its options in its own file here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from common.errors import ConfigError, flag, require_at_least
from engine.drafters.base import Drafter, HostDrafter, check_gamma
from engine.drafters.schedules import OF_CONFIDENCE, THRESHOLD, Confidence, Heuristic, Schedule
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import KVCache
from kv_cache.policy import BudgetedPolicy, Policy, registered
from kv_cache.streaming import Streaming
from models import ModelConfig
from models.checkpoints.model_source import ModelSource
from models.heads.loading import find_head
from models.names import Dtype, KVDtype, Scheme


@dataclass(frozen=True)
class Parts:
    """What a session has for a drafter to be made of.

    gamma: the most that a round drafts. model: what drafts, a Transformer or a head, of which this rank may hold
    nothing. new_cache: an empty cache of the draft's policy. remote: stands for a model that other ranks hold. texts:
    what plain decoding emitted. rehearses: whether prompts are decoded before, to measure what that costs.
    """

    runner: ModelRunner
    gamma: int
    model: Any
    new_cache: Callable[[ModelConfig], KVCache]
    remote: Callable[[], RemoteRunner]
    texts: Sequence[Sequence[int]] | None = None
    rehearses: bool = False


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ABC):
    """Options of a drafter, whose fields are its flags; a file in this folder that defines one is all that it takes."""

    name: ClassVar[str]
    # Whether it proposes what the baseline emitted, which has to run first.
    needs_baseline: ClassVar[bool] = False
    # Whether it drafts by the texts of other requests, so that these show in how much is accepted.
    shares_texts: ClassVar[bool] = False
    # The option without which there is nothing to draft from.
    needs_option: ClassVar[str | None] = None

    gamma: int | Literal["auto"] = 3
    """tokens drafted per round; auto: 0 to 6, what pays best by the costs measured here and the acceptance seen so far,
    chosen before every round"""
    gamma_schedule: Literal["constant", "heuristic", "confidence", "auto"] | None = None
    """how far rows draft. constant: gamma tokens; heuristic: two more if all of the last were accepted, else one less;
    confidence: while a draft model is sure; auto: as --gamma auto (default: constant, or auto with --gamma auto)"""

    @abstractmethod
    def build(self, parts: Parts) -> Drafter:
        """The drafter, over an empty cache if it has one."""

    @property
    def inner(self) -> DrafterConfig | None:
        """What drafts for it, if anything does."""
        return None

    @property
    def has_model(self) -> bool:
        """Whether it, or what drafts for it, is a second model."""
        return "draft_model" in vars(self) or (self.inner is not None and self.inner.has_model)

    @property
    def unused(self) -> tuple[str, ...]:
        """Options that have no effect beside the others."""
        return () if self.gamma_schedule == "confidence" else OF_CONFIDENCE

    def schedule(self, parts: Parts) -> Schedule:
        """How many of a round's tokens each row drafts, by the drafter of those parts."""
        of_rows = parts.runner.max_batch, parts.runner.device
        if self.gamma_schedule == "confidence":
            threshold, p_min = (getattr(self, name) for name in OF_CONFIDENCE)
            return Confidence(threshold, p_min, *of_rows)
        return Heuristic(parts.gamma, *of_rows) if self.gamma_schedule == "heuristic" else Schedule()

    def find_source(self, target: ModelSource, load_format: str, verify: bool) -> ModelSource | None:
        """The second model that it needs, or that drafts for it: found, not loaded. Errors: UserError."""
        return None

    def check(self) -> None:
        """Raise ConfigError if the options do not go together."""
        if self.gamma != "auto":
            require_at_least("gamma", self.gamma, 0)
        own = self.gamma_schedule
        if own is not None and (own == "auto") != (self.gamma == "auto"):
            what, where = "gamma and its schedule contradict each other", f"{flag('gamma')}, {flag('gamma_schedule')}"
            fix = f"leave out {flag('gamma')}" if own == "auto" else f"name a number: {flag('gamma')} 3"
            raise ConfigError(what, where, f"{self.gamma} and {own}", "auto for both, or for neither", fix)
        if own == "confidence" and not isinstance(self, ModelDrafterConfig):
            what, where = "rows of this draft cannot stop by its confidence", flag("gamma_schedule")
            seen, required = f"{own} with draft {self.name}", "constant, heuristic or auto"
            raise ConfigError(what, where, seen, required, f"use {where} heuristic")


@dataclass(frozen=True, kw_only=True)
class HostDrafterConfig(DrafterConfig):
    """A drafter that looks tokens up on the host, where others can stand beside it."""

    @property
    def longest_match(self) -> int | None:
        """The most tokens by which it finds a guess; None: no bound, or not known before it is built."""
        return None

    @abstractmethod
    def build(self, parts: Parts) -> HostDrafter: ...


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(DrafterConfig):
    """A drafter that runs a model over a KV cache of its own."""

    policy: Policy = field(default_factory=Streaming)
    policies: tuple[BudgetedPolicy, ...] = ()
    draft_dtype: Literal["auto", "same"] | Dtype = "auto"
    """dtype of the draft's weights and cache; same: the target's (a self-draft then shares its weights); auto: bfloat16
    beside a float32 target on a CPU that computes in bfloat16, else same"""
    draft_weights: Literal["auto", "same"] | Scheme = "auto"
    """the draft's linear layers in 8 or 4 bits; the target keeps its own, so the output stays what it is; same: as
    --draft_dtype says, or a self-draft's as the target's; auto: on a CPU with VNNI int8, or int4 for a
    model that was published in 4 bits, if neither --draft_dtype nor --quantize is given, else same"""
    draft_kv_dtype: Literal["same"] | KVDtype = "same"
    """entries of the draft's KV cache"""
    confidence_threshold: float | Literal["auto"] = THRESHOLD
    """--gamma_schedule confidence: a row stops behind a token less probable than this; auto: by what was accepted"""
    p_min: float = 0.0
    """--gamma_schedule confidence: a row stops before a token where the most probable one is less than this"""
    texts: tuple[HostDrafterConfig, ...] = ()
    text_match: int = 8
    """tokens that --text_drafts have to have found a guess by, for it to stand in for the model's drafts"""

    @property
    def auto_budget(self) -> bool:
        return isinstance(self.policy, BudgetedPolicy) and self.policy.draft_budget == "auto"

    @property
    def unused(self) -> tuple[str, ...]:
        return super().unused if self.texts else (*super().unused, "text_match")

    def check(self) -> None:
        super().check()
        for text in self.texts:
            text.check()
            if text.longest_match is not None and text.longest_match < self.text_match:
                what, where = f"{text.name} finds no guess by so many tokens", flag("text_match")
                required, fix = f"<= {text.longest_match}", f"use {where} {text.longest_match} or less"
                raise ConfigError(what, where, self.text_match, required, fix)
        for name in OF_CONFIDENCE:
            if (share := getattr(self, name)) != "auto" and not 0 <= share <= 1:
                raise ConfigError(f"{flag(name)} is no probability", flag(name), share, "0 to 1", "leave it out")
        if not self.auto_budget:
            for policy in self.policies or (self.policy,):
                if self.gamma != "auto":  # first, as it asks for more of the budget
                    check_gamma(self.gamma, policy.room, policy.for_block(self.gamma + 1))
                policy.check()


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Options of a head that was trained for the target."""

    draft_model: str
    """the draft's converted checkpoint; of medusa and eagle: the head as it was published, a folder or its weights"""

    def find_source(self, target: ModelSource, load_format: str, verify: bool) -> ModelSource:
        return find_head(self.draft_model, self.name, target.config)


def drafters() -> dict[str, type[DrafterConfig]]:
    """The options of every drafter by its name: what the files of this folder define."""
    return registered("engine.drafters", Path(__file__).parent, DrafterConfig)
