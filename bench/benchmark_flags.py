"""Flags of the three benchmarks."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from bench.config import Passes, PlainRun, RankOptions, RunConfig, TargetBesideDraft
from bench.draft_flags import HEADS, draft_flags

SelfDraft: Any = draft_flags()
Standalone: Any = draft_flags(["standalone", *HEADS], flags={"draft_model": "model"})


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(PlainRun):
    ranks: RankOptions = field(default_factory=RankOptions)

    def config(self) -> RunConfig:
        """Return the run that the flags describe. Errors: ConfigError."""
        groups = dict(vars(self))
        if "draft" in groups:
            groups["draft"] = groups["draft"].config()
        return RunConfig(**groups)


@dataclass(frozen=True, kw_only=True)
class SelfSpecFlags(BaselineFlags):
    draft: SelfDraft = field(default_factory=SelfDraft)
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(BaselineFlags):
    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: Standalone
    passes: Passes = field(default_factory=Passes)
