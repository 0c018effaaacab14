"""Flags of every subcommand: TARGET and DRAFT, how both are stored, how drafts are made, and sampling."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from bench.config import DEFAULT_MODEL, RunConfig, Sampling, Target
from bench.draft_flags import DraftFlags
from common.errors import flag, refuse
from engine.drafters.config import require_gamma

TARGET: Any = arg(metavar="[TARGET]", help_behavior_hint="(default: the built-in model)")
SECOND: Any = arg(metavar="[DRAFT]", help_behavior_hint="(default: self)")


@dataclass(frozen=True)
class PositionalTarget(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Positional[Annotated[str, TARGET]] = DEFAULT_MODEL
    """the target's converted checkpoint: its model.pth, or its folder"""


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
        return RunConfig(**groups | {"draft": drafts[0], "auto_drafts": drafts[1:]} | chosen)
