"""The flags of a draft that is named by one word or path: what drafts, how it is stored, how far it drafts."""

import os
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from bench.draft_flags import draft_flags
from common.errors import ConfigError, flag, require_at_least
from common.flags import Common
from engine.drafters.config import DrafterConfig, drafters

NAMES = [*draft_flags().KINDS]
WITH_MODEL = [name for name in drafters() if name not in NAMES]
DRAFT_HELP = f"{', '.join(NAMES)}, or a smaller model's converted checkpoint, or a head: eagle:PATH, medusa:PATH"
DRAFT: Any = arg(metavar="DRAFT", help=DRAFT_HELP, help_behavior_hint="(default: self)")
EveryDraft: Any = draft_flags(drafters(), without=("draft", "draft_model", "draft_ranks"))


@dataclass(frozen=True, kw_only=True)
class NamedDraft(EveryDraft):
    """What drafts, and how."""

    draft: Common[Annotated[str | None, DRAFT]] = None

    def config(self, **chosen: Any) -> DrafterConfig:
        """Errors: ConfigError also for a draft that there is not, and where nothing would be drafted."""
        if self.gamma is not None and self.gamma != "auto":
            require_at_least("gamma", self.gamma, 1)
        name = self.draft or "self"
        kind, _, path = name.partition(":")
        if path and kind in WITH_MODEL:
            chosen = {"draft": kind, "draft_model": path} | chosen
        elif name in NAMES:
            chosen = {"draft": name} | chosen
        elif os.path.exists(name):
            chosen = {"draft": "standalone", "draft_model": name} | chosen
        else:
            fix = f"name its folder: {name}:FOLDER" if name in WITH_MODEL else "check the spelling and the folder"
            required = f"{', '.join(NAMES)}, or a converted checkpoint"
            raise ConfigError("there is no such draft", flag("draft"), name[:80], required, fix)
        return super().config(**chosen)
