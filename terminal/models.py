"""Flags of every subcommand: TARGET and DRAFT, how both are stored, how drafts are made, and sampling."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from bench.config import DEFAULT_MODEL, RunConfig, Sampling, Target
from bench.draft_flags import NamedDraft
from common.errors import flag, refuse
from engine.drafters.config import DrafterConfig

TARGET: Any = arg(metavar="[TARGET]", help_behavior_hint="(default: the built-in model)")
SECOND: Any = arg(metavar="[DRAFT]", help_behavior_hint="(default: self)")


@dataclass(frozen=True)
class PositionalTarget(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Positional[Annotated[str, TARGET]] = DEFAULT_MODEL
    """the target's converted checkpoint: its model.pth, or its folder"""


@dataclass(frozen=True, kw_only=True)
class Draft(NamedDraft):
    """The draft."""

    second: Positional[Annotated[str | None, SECOND]] = None  # the draft, as --draft

    def config(self, **chosen: Any) -> DrafterConfig:
        """Return the configuration of the drafter. Errors: ConfigError, also for two drafts."""
        if self.second is None:
            return super().config(**chosen)
        if self.draft not in (None, self.second):
            where, seen = f"DRAFT, {flag('draft')}", f"{self.second}, {self.draft}"
            refuse(where, seen, "one draft", "two drafts are named", f"leave out {flag('draft')}")
        return replace(self, draft=self.second, second=None).config(**chosen)


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
        return RunConfig(**groups | {"draft": self.draft.config()} | chosen)
