"""Flags of the three benchmarks."""

from dataclasses import dataclass, field
from typing import ClassVar

from bench.config import Passes, PlainRun, RankOptions, RunConfig, TargetBesideDraft
from bench.draft_flags import DraftFlags, ModelDraft


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(PlainRun):
    ranks: RankOptions = field(default_factory=RankOptions)

    def config(self) -> RunConfig:
        """Return the run that the flags describe. Errors: ConfigError."""
        return RunConfig(**vars(self))


@dataclass(frozen=True, kw_only=True)
class SelfSpecFlags(BaselineFlags):
    draft: DraftFlags = field(default_factory=DraftFlags)
    passes: Passes = field(default_factory=Passes)

    def config(self) -> RunConfig:
        (drafts,) = self.draft.choices({})
        return RunConfig(**vars(self) | {"draft": drafts[0], "auto_drafts": drafts[1:]})


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(SelfSpecFlags):
    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: ModelDraft = field(default_factory=ModelDraft)
