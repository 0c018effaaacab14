"""Flags of the cost model."""

from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, ClassVar

from tyro.conf import arg

from bench.config import Output, Sampling, Target, Text
from bench.draft_flags import DraftOptions
from common.errors import ConfigError, flag, require_at_least
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig

# Fields of `Target` that a prediction depends on.
PREDICTED_BY = ("model", "model_name", "dtype", "quantize", "kv_dtype")
Draft = tuple[str, int]


@dataclass(frozen=True)
class CostFlags:
    """The sizes and drafts to measure or predict."""

    FLAGS: ClassVar[dict[str, str]] = {
        "B": "--batches",
        "gen_len": "new tokens",
        "prefix_len": "--contexts",
        "gamma": "--gammas",
        "draft_policy": "--policies",
        "draft_budget": "--budgets",
    }

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sampling: Sampling = field(default_factory=Sampling)
    output: Output = field(default_factory=Output)
    draft: DraftOptions = field(default_factory=DraftOptions)
    machine: str | None = None
    """predict, and measure nothing: A100-40, A100-80, H100, H200, L40 or L40S, eight of them as 8xH100, or numbers in
    SI units, such as 8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5 (default: measure on this machine)"""
    batches: Annotated[tuple[int, ...], arg(aliases=["--B", "--batch_size"])] = (1, 4, 8)
    """rows decoded together"""
    contexts: Annotated[tuple[int, ...], arg(aliases=["--context"])] = (1000, 4000)
    """tokens per row"""
    policies: tuple[str, ...] = ("streaming", "snapkv")
    """of the draft"""
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    """KV entries of the draft"""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6)
    """tokens drafted per round"""
    alpha: float | None = None
    """acceptance rate of every draft (default: measured on the data set's text)"""

    def sorted(self, name: str) -> list[int]:
        """Return the distinct sizes of a list, ascending."""
        return sorted(set(getattr(self, name)))

    def configs(self) -> dict[Draft, DrafterConfig]:
        """Return the drafts by policy and budget, at the largest gamma. Errors: ConfigError."""
        drafts = list(product(self.policies, self.sorted("budgets")))
        options = [{"draft_policy": name, "draft_budget": n, "gamma": max(self.gammas)} for name, n in drafts]
        return dict(zip(drafts, self.draft.variants(*options), strict=True))

    def check(self) -> None:
        """Raise ConfigError for a number out of range, and for random weights without alpha."""
        for name, minimum in {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}.items():
            require_at_least(name, min(getattr(self, name)), minimum)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError("an acceptance rate is a probability", flag("alpha"), self.alpha, "0 to 1", "use 0.8")
        if self.machine is not None:
            given = vars(self.target) | vars(self.text) | vars(self.sampling)
            defaults = vars(Target()) | vars(Text()) | vars(Sampling())
            if unused := [name for name in given if given[name] != defaults[name] and name not in PREDICTED_BY]:
                note_without_effect(unused, "costs are predicted: nothing is loaded or measured")
        elif self.alpha is None:
            self.target.require_trained(f"random weights have no acceptance: add {flag('alpha')} 0.8")
