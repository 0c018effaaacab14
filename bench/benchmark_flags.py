"""The command lines of the three benchmarks: what each has flags for."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from bench.config import Passes, PlainRun, RankOptions, RunConfig, TargetBesideDraft
from bench.draft_flags import draft_flags

SelfDraft: Any = draft_flags()
Standalone: Any = draft_flags(["standalone", "eagle", "medusa"], flags={"draft_model": "model"})


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(PlainRun):
    ranks: RankOptions = field(default_factory=RankOptions)

    def config(self) -> RunConfig:
        """The run that they ask for. Errors: ConfigError for draft flags without effect."""
        own = dict(vars(self))
        if "draft" in own:
            own["draft"] = own["draft"].config()
        return RunConfig(**own)


@dataclass(frozen=True, kw_only=True)
class SelfSpecFlags(BaselineFlags):
    ELSEWHERE: ClassVar[dict[str, str]] = dict.fromkeys(
        Standalone.KINDS, "use tests/longspec_benchmark.py, whose --model is the draft's checkpoint"
    )

    draft: SelfDraft = field(default_factory=SelfDraft)
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(BaselineFlags):
    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}
    ELSEWHERE: ClassVar[dict[str, str]] = dict.fromkeys(SelfDraft.KINDS, "use tests/selfspec_benchmark.py")

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: Standalone
    passes: Passes = field(default_factory=Passes)
