"""DrafterConfig, the options of a draft, and DraftPlan, which they become for a target; `drafters` finds every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Flag, auto
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from common.errors import flag, refuse
from common.plug_ins import registered
from engine.drafters.base import Drafter, check_most_drafts
from engine.drafters.schedules import OF_CONFIDENCE, Heuristic, Schedule
from engine.drafters.stored import Models, PlannedTarget, Weights
from engine.runner import ModelRunner
from kv_cache import Policy
from kv_cache.policy import policies
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer

AUTO: Final = "auto"
# Makes the configuration of a kind, the first argument, from the options given on a command line and these keywords.
Maker: TypeAlias = Callable[..., Any]
# The largest gamma that `--gamma auto` chooses.
AUTO_GAMMA = 6


class Trait(Flag):
    """Facts about a kind of draft that programs need; a draft that wraps drafts has the traits of all of them."""

    NONE = 0
    NEEDS_BASELINE = auto()  # proposes the output of plain decoding, which has to run first
    SHARES_TEXTS = auto()  # drafts by the texts of other requests, so that acceptance depends on them
    READS_PREDICTIONS = auto()  # looks matches up in a request's prediction, too
    SECOND_MODEL = auto()  # runs a model or a head next to the target
    HIERARCHICAL = auto()  # verifies the tokens of another draft


@dataclass(frozen=True)
class BuildInputs:
    """The parts that a session builds drafters from.

    length: tokens of the longest row. texts: the outputs of plain decoding. profiles: True if prompts are decoded
    before, to measure costs. tokenizer: the leader's; None without text.
    """

    runner: ModelRunner
    models: Models
    length: int
    texts: Sequence[Sequence[int]] | None = None
    profiles: bool = False
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, kw_only=True)
class DraftPlan(ABC):
    """A draft for a target, with one policy and one budget; checked and sized, with nothing loaded.

    gamma: the most draft tokens of a round. policy, capacity: of its KV cache, with the entries of a row; None and 0
    without a cache. source: its second model, None if there is none. group: ranks that hold that model. parts: plans of
    the drafts that it is made of, the main one first.
    """

    config: DrafterConfig
    gamma: int
    policy: Policy | None = None
    capacity: int = 0
    source: ModelSource | None = None
    group: tuple[int, ...] = ()
    parts: tuple[DraftPlan, ...] = ()

    @abstractmethod
    def make(self, inputs: BuildInputs) -> Drafter:
        """Make the drafter, over an empty cache if it has one."""

    def build(self, inputs: BuildInputs) -> Drafter:
        """Make the drafter with its schedule."""
        drafter = self.make(inputs)
        drafter.schedule = self.config.schedule(self.gamma, inputs.runner)
        return drafter

    def n_bytes(self, target: PlannedTarget, profiles: bool) -> tuple[dict[Weights, int], int]:
        """Return the bytes, on the rank with the largest shard, of models that only drafts run, and of a row of
        `target.capacity` tokens. profiles: see `BuildInputs`."""
        each = [part.n_bytes(target, profiles) for part in self.parts]
        weights = {weights: size for of_models, _ in each for weights, size in of_models.items()}
        return weights, sum(per_row for _, per_row in each)

    def load(self, models: Models) -> None:
        """Load the models that draft, unless they are loaded."""
        for part in self.parts:
            part.load(models)

    def reads(self, target: PlannedTarget) -> dict[str, float]:
        """Return what a draft step reads, as shares of the bytes of the target's weights, and of the entries of a row
        at its end and their bytes; empty for a draft without a cache."""
        return self.parts[0].reads(target) if self.parts else {}

    def record(self) -> dict[str, Any]:
        """Return the settings of the draft, with its storage if it has a cache."""
        if self.parts:
            return self.parts[0].record()
        record: dict[str, Any] = {"draft": self.config.kind, "gamma": self.gamma}
        record |= {"draft_policy": self.policy and self.policy.name, "draft_budget": self.capacity or None}
        if self.source:
            record |= {"draft_model": self.source.name, "draft_borrows": list(self.source.borrowed)}
        return record

    def budget_covers(self, target: PlannedTarget) -> bool:
        """Return whether the cache has a budget, which is no smaller than a row at its end."""
        longest = target.prefix_len + target.gen_len
        return self.policy is not None and self.policy.within(longest - 1, 1) != self.policy

    def remarks(self, target: PlannedTarget) -> list[str]:
        """Return sentences about the draft that a user should read. Errors: ConfigError for another vocabulary."""
        return [remark for part in self.parts for remark in part.remarks(target)]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ABC):
    """Options of a draft; the fields are its flags (bench/draft_flags.py). A draft that wraps drafts has no `name`."""

    KEY: ClassVar[str] = "name"
    name: ClassVar[str]
    TRAITS: ClassVar[Trait] = Trait.NONE
    SCHEDULES: ClassVar[tuple[str | None, ...]] = (None, "constant", "heuristic", AUTO)

    gamma: int | Literal["auto"] = 3
    gamma_schedule: Literal["constant", "heuristic", "confidence", "auto"] | None = None

    @abstractmethod
    def plan(self, target: PlannedTarget) -> DraftPlan:
        """Check the options and sizes of a draft, and return its plan. Not for `auto` budgets. Errors: UserError."""

    @property
    def kind(self) -> str:
        """The name of the draft's kind; of a draft that wraps drafts, that of the draft that runs the model."""
        return self.name

    @property
    def traits(self) -> Trait:
        return self.TRAITS

    @property
    def automatic(self) -> tuple[str, ...]:
        """The options that are chosen before every round."""
        return ("gamma",) if self.gamma == AUTO else ()

    @property
    def most_gamma(self) -> int:
        """The most draft tokens of a round that the options allow."""
        return AUTO_GAMMA if self.gamma == AUTO else self.gamma

    def fitting_gamma(self, most_drafts: int) -> int:
        """Return the most draft tokens of a round, for a model that drafts `most_drafts` at most. Errors: ConfigError
        for a larger gamma."""
        if self.gamma != AUTO:
            check_most_drafts(self.gamma, most_drafts)
        return min(self.most_gamma, most_drafts)

    def alternatives(self, prefix_len: int) -> Sequence[Self]:
        """Return a configuration for each budget that `auto` stands for; this alone without it."""
        return [self]

    def within(self, n_entries: int, gamma: int) -> Self:
        """Return the draft with a budget of at most `n_entries` entries, but with room for `gamma` tokens, if it has a
        fixed budget that is larger; else this draft."""
        return self

    def ablated(self, has_weights: bool, has_budget: bool) -> Self:
        """Return the draft with the target's form of weights unless it `has_weights` of its form, and with all entries
        unless it `has_budget`; a draft without a cache stays as it is."""
        return self

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that have no effect next to the others."""
        return () if self.gamma_schedule == "confidence" else OF_CONFIDENCE

    def options(self) -> dict[str, Any]:
        """Return the options that have an effect, by flag."""
        names = [option.name for option in fields(self) if option.name not in self.unused]
        return {"draft": self.kind, **{name: getattr(self, name) for name in names}}

    def schedule(self, gamma: int, runner: ModelRunner) -> Schedule:
        """Return a schedule for rounds of up to `gamma` draft tokens."""
        is_heuristic = self.gamma_schedule == "heuristic"
        return Heuristic(gamma, runner.max_batch, runner.device) if is_heuristic else Schedule()

    def check(self) -> None:
        """Raise ConfigError if the options do not go together."""
        require_gamma(self.gamma, 0)
        schedule = self.gamma_schedule
        if schedule is not None and (schedule == AUTO) != (self.gamma == AUTO):
            what, where = "gamma and its schedule contradict each other", f"{flag('gamma')}, {flag('gamma_schedule')}"
            fix = f"leave out {flag('gamma')}" if schedule == AUTO else f"name a number: {flag('gamma')} 3"
            refuse(where, f"{self.gamma} and {schedule}", "auto for both, or for neither", what, fix)
        if schedule not in self.SCHEDULES:
            what, fix = "rows of this draft cannot stop by its confidence", f"use {flag('gamma_schedule')} heuristic"
            refuse("gamma_schedule", f"{schedule} with draft {self.kind}", "constant, heuristic or auto", what, fix)


@dataclass(frozen=True, kw_only=True)
class Wrapper(DrafterConfig):
    """Options of a draft that wraps a draft; gamma and its schedule are those given here.

    ASKED_BY: the option, by flag, that asks for it.
    """

    KEY: ClassVar[str] = "ASKED_BY"
    ASKED_BY: ClassVar[str]

    draft: DrafterConfig

    @property
    def wrapped(self) -> DrafterConfig:
        """The draft that is wrapped, with this gamma and schedule."""
        return replace(self.draft, gamma=self.gamma, gamma_schedule=self.gamma_schedule)

    @property
    def kind(self) -> str:
        return self.draft.kind

    @property
    def traits(self) -> Trait:
        return self.draft.traits

    @property
    def automatic(self) -> tuple[str, ...]:
        return self.wrapped.automatic

    @property
    def unused(self) -> tuple[str, ...]:
        return ("draft",)

    def options(self) -> dict[str, Any]:
        return {**self.wrapped.options(), **super().options()}

    def check(self) -> None:
        self.wrapped.check()

    def alternatives(self, prefix_len: int) -> Sequence[Self]:
        return [replace(self, draft=draft) for draft in self.draft.alternatives(prefix_len)]

    def within(self, n_entries: int, gamma: int) -> Self:
        return replace(self, draft=self.draft.within(n_entries, gamma))

    def ablated(self, has_weights: bool, has_budget: bool) -> Self:
        return replace(self, draft=self.draft.ablated(has_weights, has_budget))

    @classmethod
    def around(cls, draft: DrafterConfig, given: Mapping[str, Any], made: Maker) -> DrafterConfig:
        """Return a draft with this wrapper, by the options `given` by flag; the draft itself if it has no use for it.
        Errors: ConfigError for a draft that cannot be wrapped."""
        return made(cls, draft=draft)

    def plan(self, target: PlannedTarget) -> WrapperPlan:
        self.check()
        inner = self.wrapped.plan(target)
        facts = {name: getattr(inner, name) for name in ("gamma", "policy", "capacity", "source", "group")}
        return WrapperPlan(config=self, parts=(inner,), **facts)

    @abstractmethod
    def wrap(self, inputs: BuildInputs, *drafters: Drafter) -> Drafter:
        """Make the drafter around those of the plan's parts, which have their schedules."""


@dataclass(frozen=True, kw_only=True)
class WrapperPlan(DraftPlan):
    """The plan of a draft that wraps others, its parts. Its schedule is that of the main one."""

    config: Wrapper

    def make(self, inputs: BuildInputs) -> Drafter:
        return self.config.wrap(inputs, *(part.build(inputs) for part in self.parts))

    def build(self, inputs: BuildInputs) -> Drafter:
        return self.make(inputs)


def wrappers() -> list[type[Wrapper]]:
    """Return every wrapper of the files of this folder, in the order of their names."""
    return sorted(registered("engine.drafters", Wrapper).values(), key=lambda kind: kind.__module__)


def require_gamma(gamma: int | Literal["auto"], least: int) -> None:
    """Raise ConfigError unless gamma is `auto` or at least `least`."""
    if gamma != AUTO and gamma < least:
        where = flag("gamma")
        fix = f"use {where} {least} or more"
        refuse("gamma", gamma, f"auto, or >= {least}", f"{where} is too small", fix)


def drafters() -> dict[str, type[DrafterConfig]]:
    """Return the options of every kind of draft, by its name."""
    return registered("engine.drafters", DrafterConfig)


def plug_ins() -> list[type[Policy | DrafterConfig]]:
    """Return every policy, every kind of draft, and every wrapper."""
    return [*policies().values(), *drafters().values(), *wrappers()]
