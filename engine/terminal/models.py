"""What every subcommand has flags for: TARGET and DRAFT, how both are stored, what drafts how far, and sampling."""

import os
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from common.errors import ConfigError, flag, require_at_least
from engine.bench.config import DEFAULT_MODEL, RunConfig, Sampling, Target
from engine.bench.draft_flags import draft_flags
from engine.drafters.config import DrafterConfig, drafters

NAMES = [*draft_flags().KINDS]
WITH_MODEL = [name for name in drafters() if name not in NAMES]
DRAFT_HELP = f"{', '.join(NAMES)}, or a smaller model's converted checkpoint, or a head: eagle:PATH, medusa:PATH"
EveryDraft: Any = draft_flags(drafters(), without=("draft", "draft_model", "draft_ranks"))


@dataclass(frozen=True)
class PositionalTarget(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Positional[Annotated[str, arg(metavar="[TARGET]", help_behavior_hint="(default: the built-in model)")]] = (
        DEFAULT_MODEL
    )
    """the target's converted checkpoint: its model.pth, or its folder"""


@dataclass(frozen=True, kw_only=True)
class NamedDraft(EveryDraft):
    """What drafts, and how."""

    draft: Annotated[str, arg(metavar="DRAFT", help=DRAFT_HELP)] = "self"

    def config(self, **chosen: Any) -> DrafterConfig:
        """Errors: ConfigError also for a draft that there is not, and where nothing would be drafted."""
        if self.gamma is not None and self.gamma != "auto":
            require_at_least("gamma", self.gamma, 1)
        kind, _, path = self.draft.partition(":")
        if path and kind in WITH_MODEL:
            chosen = {"draft": kind, "draft_model": path} | chosen
        elif self.draft not in NAMES:
            if not os.path.exists(self.draft):
                required, fix = f"{', '.join(NAMES)}, or a converted checkpoint", "check the spelling and the folder"
                raise ConfigError("there is no such draft", flag("draft"), self.draft[:80], required, fix)
            chosen = {"draft": "standalone", "draft_model": self.draft} | chosen
        return super().config(**chosen)


@dataclass(frozen=True, kw_only=True)
class Draft(NamedDraft):
    """What drafts, and how."""

    draft: Positional[Annotated[str, arg(metavar="[DRAFT]", help=DRAFT_HELP)]] = "self"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Those of one process. A subcommand adds groups of a `RunConfig` under their names there, and flags of its own."""

    FLAGS: ClassVar[dict[str, str]] = {"model": "TARGET", "draft": "DRAFT", "draft_model": "DRAFT"}

    target: PositionalTarget = field(default_factory=PositionalTarget)
    draft: Draft = field(default_factory=Draft)
    sampling: Sampling = field(default_factory=Sampling)

    def config(self, **chosen: Any) -> RunConfig:
        """The run that they ask for; `chosen`: what the subcommand has no flags for. Errors: as of the draft."""
        own = {one.name: getattr(self, one.name) for one in fields(RunConfig) if hasattr(self, one.name)}
        return RunConfig(**own | {"draft": self.draft.config()} | chosen)
