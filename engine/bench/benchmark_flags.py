"""The command lines of the three benchmarks: what each has flags for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from engine.bench.config import (
    Output,
    Passes,
    RankOptions,
    Rows,
    RunConfig,
    Sampling,
    Sizes,
    Target,
    TargetBesideDraft,
    Text,
)
from engine.bench.draft_flags import DraftFlags, draft_flags

SelfDrafts = draft_flags()
Standalone = draft_flags(["standalone"], flags={"draft_model": "model"})


@dataclass(frozen=True)
class BaselineFlags:
    """Plain decoding."""

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    rows: Rows = field(default_factory=Rows)
    sampling: Sampling = field(default_factory=Sampling)
    ranks: RankOptions = field(default_factory=RankOptions)
    output: Output = field(default_factory=Output)
    printoutput: bool = False
    """print every row's generated text"""

    def config(self) -> RunConfig:
        return run_config(self)


@dataclass(frozen=True)
class SelfSpecFlags(BaselineFlags):
    """Speculation that needs no second model."""

    draft: SelfDrafts = field(default_factory=SelfDrafts)  # type: ignore[valid-type]
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(BaselineFlags):
    """Speculation with a model of its own that drafts."""

    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: Standalone  # type: ignore[valid-type]
    passes: Passes = field(default_factory=Passes)


def run_config(flags: BaselineFlags) -> RunConfig:
    """The run that those flags ask for. Errors: ConfigError for draft flags without effect."""
    draft = getattr(flags, "draft", None)
    return RunConfig(
        target=flags.target,
        text=flags.text,
        sizes=flags.sizes,
        rows=flags.rows,
        sampling=flags.sampling,
        ranks=flags.ranks,
        output=flags.output,
        draft=draft.config() if isinstance(draft, DraftFlags) else None,
        passes=getattr(flags, "passes", Passes()),
        printoutput=flags.printoutput,
    )
