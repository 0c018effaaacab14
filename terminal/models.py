"""Flags and plans of subcommands: TARGET and DRAFT, how both are stored, how drafts are made, and sampling."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from bench.config import DEFAULT_MODEL, RunConfig, Sampling, Target
from bench.draft_flags import NAME, DraftFlags
from bench.plan import Plan, PromptText, resolve
from common.errors import flag, refuse
from common.say import say
from engine.drafters.config import Trait, drafters, require_gamma
from models.checkpoints.model_source import ModelSource

TARGET: Any = arg(metavar="[TARGET]", help_behavior_hint="(default: the built-in model)")
SECOND: Any = arg(metavar="[DRAFT]", help_behavior_hint="(default: self)")


@dataclass(frozen=True)
class PositionalTarget(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Positional[Annotated[str, TARGET]] = DEFAULT_MODEL
    """the target's converted checkpoint: its model.pth, or its folder"""

    def source(self) -> ModelSource:
        name = NAME.fullmatch(self.model)
        if name and name[2] in drafters() and not os.path.exists(self.model):
            what, fix = "a draft is named in the target's place", f"use {flag('draft')} {self.model}"
            refuse("model", self.model, "a converted checkpoint", what, fix)
        return super().source()


@dataclass(frozen=True, kw_only=True)
class Draft(DraftFlags):
    """The draft."""

    second: Positional[Annotated[str | None, SECOND]] = None  # the draft, as --draft

    def given(self) -> dict[str, Any]:
        """Return the options that were given. Errors: ConfigError for two drafts."""
        given = super().given()
        second = given.pop("second", None)
        if second is None:
            return given
        if self.draft not in (None, second):
            where, seen = f"DRAFT, {flag('draft')}", f"{second}, {self.draft}"
            refuse(where, seen, "one draft", "two drafts are named", f"leave out {flag('draft')}")
        return given | {"draft": second}


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of a subcommand. Subclasses add groups of a `RunConfig`, under their names, and other flags."""

    FLAGS: ClassVar[dict[str, str]] = {"model": "TARGET", "draft_model": "--draft"}

    target: PositionalTarget = field(default_factory=PositionalTarget)
    draft: Draft = field(default_factory=Draft)
    sampling: Sampling = field(default_factory=Sampling)

    def config(self, **chosen: Any) -> RunConfig:
        """Return the run that the flags describe. chosen: fields without flags. Errors: ConfigError."""
        groups = {group.name: getattr(self, group.name) for group in fields(RunConfig) if hasattr(self, group.name)}
        (drafts,) = self.draft.choices({})
        for draft in drafts:
            require_gamma(draft.gamma, 1)
        return RunConfig(**groups | {"draft": None} | chosen).with_drafts(*drafts)


def require_fixed_text(config: RunConfig) -> None:
    """Raise ConfigError for random weights, and for a draft that needs the tokens of plain decoding."""
    config.target.require_trained()
    if config.draft and Trait.NEEDS_BASELINE in config.draft.traits:
        what, required = "nothing is known of the answers beforehand", "a draft that needs no plain decoding first"
        refuse("draft", config.draft.kind, required, what, "use tests/selfspec_benchmark.py")


def plan_in_turns(config: RunConfig, texts: Sequence[PromptText] | None = None, *, evicts: bool = False) -> Plan:
    """Return the plan of a run that decodes prompts plainly and speculatively in turns. Errors: UserError.

    evicts: lower fixed draft budgets to half of the longest prompt, or to the most that a draft needs, since a cache
    with room for the whole prompt would hold what the target's holds.
    """
    require_fixed_text(config)
    plan = resolve(config, texts)

    def lowered(n_entries: int) -> Plan:
        return plan.with_drafts(*(draft.within(n_entries, plan.gamma) for draft in config.drafts))

    if not evicts or (halved := lowered(plan.target.prefix_len // 2)).config.drafts == config.drafts:
        return plan
    n_entries = max(draft.capacity for draft in halved.candidates)
    said = f"{n_entries} entries of prompts of up to {plan.target.prefix_len} tokens (--draft_budget)"
    say(f"note: the draft's cache keeps {said}")
    return lowered(n_entries)  # a policy that needs more than half of a prompt sets the size of the others
