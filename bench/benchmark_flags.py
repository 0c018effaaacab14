"""Flags of the three benchmarks."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from bench.config import Passes, PlainRun, RankOptions, RunConfig, Sizes, TargetBesideDraft
from bench.draft_flags import DraftFlags, ModelDraft
from common.errors import flag, refuse


@dataclass(frozen=True)
class BenchmarkSizes(Sizes):
    """The sizes of a batch."""

    max_len: int | None = None
    """tokens of a row, prompt and new ones together, in the place of --gen_len (its name in MagicDec's scripts)"""

    def sizes(self) -> Sizes:
        """Return the sizes with the number of new tokens. Errors: ConfigError for no room after a prompt."""
        n_new = self.gen_len
        if self.max_len is not None:
            n_new = self.max_len - (self.prefix_len or self.max_len)
            if n_new < 1 or self.gen_len not in (Sizes.gen_len, n_new):
                what, fix = "no row has such a length", f"use {flag('gen_len')} instead"
                required = f"more than {flag('prefix_len')}, which has to be given, and no {flag('gen_len')}"
                refuse("max_len", self.max_len, required, what, fix)
        return Sizes(self.B, self.prefix_len, n_new)


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(PlainRun):
    sizes: BenchmarkSizes = field(default_factory=BenchmarkSizes)
    ranks: RankOptions = field(default_factory=RankOptions)

    def config(self, **drafts: Any) -> RunConfig:
        """Return the run that the flags describe. drafts: fields without flags. Errors: ConfigError."""
        return RunConfig(**vars(self) | {"sizes": self.sizes.sizes()} | drafts)


@dataclass(frozen=True, kw_only=True)
class SelfSpecFlags(BaselineFlags):
    draft: DraftFlags = field(default_factory=DraftFlags)
    passes: Passes = field(default_factory=Passes)

    def config(self, **drafts: Any) -> RunConfig:
        (chosen,) = self.draft.choices({})
        return super().config(draft=None, **drafts).with_drafts(*chosen)


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(SelfSpecFlags):
    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: ModelDraft = field(default_factory=ModelDraft)
