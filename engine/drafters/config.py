"""Options that drafters share, and `drafters`, which finds those of every drafter in the files of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from common.errors import ConfigError, flag
from engine.drafters.base import Drafter, check_gamma
from engine.drafters.schedules import OF_CONFIDENCE, THRESHOLD, Confidence, Heuristic, Schedule
from engine.drafters.text_drafter import HostDrafter
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import KVCache
from kv_cache.policy import BudgetedPolicy, Policy, registered
from kv_cache.streaming import Streaming
from models import ModelConfig
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer
from models.heads.loading import find_head
from models.names import Dtype, KVDtype, Scheme


@dataclass(frozen=True)
class Parts:
    """The parts that a session builds a drafter from.

    gamma: the most tokens that a round drafts. model: a Transformer or a head that drafts, None where other ranks hold
    it. new_cache: makes an empty cache of the draft's policy. remote: makes a stand-in for a model of other ranks.
    texts: the outputs of plain decoding. rehearses: True if prompts are decoded before, to measure costs. tokenizer:
    the leader's; None without text.
    """

    runner: ModelRunner
    gamma: int
    model: Any
    new_cache: Callable[[ModelConfig], KVCache]
    remote: Callable[[], RemoteRunner]
    texts: Sequence[Sequence[int]] | None = None
    rehearses: bool = False
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ABC):
    """Options of a drafter; the fields are its flags."""

    name: ClassVar[str]
    # True if it proposes the baseline's output, so that the baseline has to run first.
    needs_baseline: ClassVar[bool] = False
    # True if it drafts by the texts of other requests, so that acceptance depends on them.
    shares_texts: ClassVar[bool] = False
    # True if it looks matches up in a request's prediction, too.
    reads_predictions: ClassVar[bool] = False
    # The option that it cannot draft without.
    needs_option: ClassVar[str | None] = None

    gamma: int | Literal["auto"] = 3
    """tokens drafted per round; auto: 0 to 6, chosen before every round by measured costs and the acceptance so far"""
    gamma_schedule: Literal["constant", "heuristic", "confidence", "auto"] | None = None
    """how far rows draft. constant: gamma tokens; heuristic: two more if all of the last were accepted, else a
    token less; confidence: while a draft model is sure; auto: as --gamma auto (default: constant, or auto with it)"""

    alternatives: tuple[DrafterConfig, ...] = ()

    @abstractmethod
    def build(self, parts: Parts) -> Drafter:
        """Make the drafter, over an empty cache if it has one."""

    @property
    def every(self) -> tuple[DrafterConfig, ...]:
        """The options, and those of the text drafters and the alternatives beside them."""
        others = (each for other in self.alternatives for each in other.every)
        return (self, *getattr(self, "texts", ()), *others)

    @property
    def inner(self) -> DrafterConfig | None:
        """Options of the inner draft, which drafts for this draft, or None."""
        return None

    @property
    def has_model(self) -> bool:
        """True if it, or its inner draft, is a second model."""
        return "draft_model" in vars(self) or (self.inner is not None and self.inner.has_model)

    @property
    def unused(self) -> tuple[str, ...]:
        """Options that have no effect beside the others."""
        return () if self.gamma_schedule == "confidence" else OF_CONFIDENCE

    def schedule(self, parts: Parts) -> Schedule:
        """Return the schedule of a drafter that is built from `parts`."""
        rows = parts.runner.max_batch, parts.runner.device
        if self.gamma_schedule == "confidence":
            threshold, p_min = (getattr(self, name) for name in OF_CONFIDENCE)
            return Confidence(threshold, p_min, *rows)
        return Heuristic(parts.gamma, *rows) if self.gamma_schedule == "heuristic" else Schedule()

    def find_source(
        self, target: ModelSource, load_format: str, verify: bool, changes: ConfigChanges = NO_CHANGES
    ) -> ModelSource | None:
        """Find, without loading it, the second model that it or its inner draft needs. changes: of that model's config.
        Errors: UserError."""
        return None

    def check(self) -> None:
        """Raise ConfigError if the options do not go together."""
        require_gamma(self.gamma, 0)
        schedule = self.gamma_schedule
        if schedule is not None and (schedule == "auto") != (self.gamma == "auto"):
            what, where = "gamma and its schedule contradict each other", f"{flag('gamma')}, {flag('gamma_schedule')}"
            fix = f"leave out {flag('gamma')}" if schedule == "auto" else f"name a number: {flag('gamma')} 3"
            raise ConfigError(what, where, f"{self.gamma} and {schedule}", "auto for both, or for neither", fix)
        if schedule == "confidence" and not isinstance(self, ModelDrafterConfig):
            what, where = "rows of this draft cannot stop by its confidence", flag("gamma_schedule")
            seen, required = f"{schedule} with draft {self.name}", "constant, heuristic or auto"
            raise ConfigError(what, where, seen, required, f"use {where} heuristic")
        if self.alternatives:
            self._check_alternatives()

    def _check_alternatives(self) -> None:
        """Raise ConfigError if drafts cannot be chosen while decoding."""
        where, names = flag("auto_drafts"), [self.name, *(other.name for other in self.alternatives)]
        if self.gamma != "auto":
            what, required = "drafts are chosen together with gamma", f"{flag('gamma')} auto"
            raise ConfigError(what, where, f"{flag('gamma')} {self.gamma}", required, f"use {required}")
        if twice := [name for name in names if names.count(name) > 1]:
            what, required = "a draft is named twice", f"other drafts than {flag('draft')}, each once"
            raise ConfigError(what, where, twice[0], required, f"leave out {twice[0]}")
        for other in self.alternatives:
            other.check()
            if other.inner or other.has_model or other.needs_baseline:
                what, fix = "this draft cannot take another draft's place", f"leave out {other.name} here"
                required = f"self without {flag('draft_of_draft')}, or a draft from text"
                raise ConfigError(what, where, other.name, required, fix)


@dataclass(frozen=True, kw_only=True)
class HostDrafterConfig(DrafterConfig):
    """Options of a drafter that looks tokens up on the host, and can stand beside a draft model."""

    @property
    def longest_match(self) -> int | None:
        """The most tokens that a guess can match; None: no bound, or unknown before the drafter is built."""
        return None

    @abstractmethod
    def build(self, parts: Parts) -> HostDrafter: ...


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(DrafterConfig):
    """Options of a drafter that runs a model over a KV cache of its budget."""

    policy: Policy = field(default_factory=Streaming)
    policies: tuple[BudgetedPolicy, ...] = ()
    draft_dtype: Literal["auto", "same"] | Dtype = "auto"
    """dtype of the draft's weights and cache; same: the target's (a self-draft then shares its weights); auto: bfloat16
    beside a float32 target on a CPU that computes in bfloat16, else same"""
    draft_weights: Literal["auto", "same"] | Scheme = "auto"
    """the draft's linear layers in 8 or 4 bits; the target keeps its own, so the output stays the same; same: as
    --draft_dtype says, or a self-draft's as the target's; auto: on a CPU with VNNI int8, or int4 for a
    model that was published in 4 bits, if neither --draft_dtype nor --quantize is given, else same"""
    draft_kv_dtype: Literal["same"] | KVDtype = "same"
    """entries of the draft's KV cache"""
    confidence_threshold: float | Literal["auto"] = THRESHOLD
    """--gamma_schedule confidence: a row stops behind a token less probable than this; auto: by acceptance so far"""
    p_min: float = 0.0
    """--gamma_schedule confidence: a row stops before a token if the most probable is below this"""
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
                what, where = f"{text.name} matches fewer tokens than a guess needs", flag("text_match")
                required, fix = f"<= {text.longest_match}", f"use {where} {text.longest_match} or less"
                raise ConfigError(what, where, self.text_match, required, fix)
        for name in OF_CONFIDENCE:
            if (share := getattr(self, name)) != "auto" and not 0 <= share <= 1:
                raise ConfigError(f"{flag(name)} is no probability", flag(name), share, "0 to 1", "leave it out")
        if not self.auto_budget:
            for policy in self.policies or (self.policy,):
                if self.gamma != "auto":  # first, since a block needs more of the budget
                    check_gamma(self.gamma, policy.room)
                policy.check()


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Options of a head that was trained for the target."""

    draft_model: str
    """the draft's converted checkpoint; of dflash, eagle and medusa: the head as it was published, a folder or its
    weights"""

    def find_source(
        self, target: ModelSource, load_format: str, verify: bool, changes: ConfigChanges = NO_CHANGES
    ) -> ModelSource:
        return find_head(self.draft_model, self.name, target.config, changes)


def require_gamma(gamma: int | Literal["auto"], least: int) -> None:
    """Raise ConfigError unless gamma is `auto` or at least `least`."""
    if gamma != "auto" and gamma < least:
        where = flag("gamma")
        raise ConfigError(f"{where} is too small", where, gamma, f"auto, or >= {least}", f"use {where} {least} or more")


def drafters() -> dict[str, type[DrafterConfig]]:
    """Return the options of every drafter, by its name."""
    return registered("engine.drafters", Path(__file__).parent, DrafterConfig)
