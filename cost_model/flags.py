"""The command line of the cost model."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

from bench.config import Output, Sampling, Target, Text
from bench.draft_flags import CHOSEN, BudgetedName, draft_flags
from common.errors import ConfigError, flag, require_at_least
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig

# Of the target, what a prediction's bytes and operations depend on.
SHAPE = ("model", "model_name", "dtype", "quantize", "kv_dtype")
Draft = tuple[str, int]
SelfDraft: Any = draft_flags(["self"], without=CHOSEN)


@dataclass(frozen=True)
class CostFlags:
    """What is measured, and predicted."""

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
    draft: SelfDraft = field(default_factory=SelfDraft)
    machine: Annotated[str | None, arg(help_behavior_hint="(default: this one, measured)")] = None
    """predict, and measure nothing: A100-40, A100-80, H100, H200, L40 or L40S, eight of them as 8xH100, or numbers in
    SI units, such as 8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5"""
    batches: Annotated[tuple[int, ...], arg(aliases=["--B", "--batch_size"])] = (1, 4, 8)
    """rows decoded together"""
    contexts: Annotated[tuple[int, ...], arg(aliases=["--context"])] = (1000, 4000)
    """tokens per row"""
    policies: tuple[BudgetedName, ...] = ("streaming", "snapkv")
    """of the draft"""
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    """KV entries of the draft"""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6)
    """tokens drafted per round"""
    alpha: Annotated[float | None, arg(help_behavior_hint="(default: measured on the data set's own text)")] = None
    """acceptance rate of every draft"""

    def sorted(self, name: str) -> list[int]:
        """The sizes of a list, each once, ascending."""
        return sorted(set(getattr(self, name)))

    def configs(self) -> dict[Draft, DrafterConfig]:
        """The drafts by policy and budget, at the largest gamma. Errors: ConfigError."""
        drafts = [(policy, budget) for policy in self.policies for budget in self.sorted("budgets")]
        each = ({"draft_policy": one, "draft_budget": budget, "gamma": max(self.gammas)} for one, budget in drafts)
        return dict(zip(drafts, self.draft.variants(*each), strict=True))

    def check(self) -> None:
        """Errors: ConfigError for a number too small, and for random weights without alpha."""
        for name, minimum in {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}.items():
            require_at_least(name, min(getattr(self, name)), minimum)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            what = "an acceptance rate is a probability"
            raise ConfigError(what, flag("alpha"), self.alpha, "0 to 1", "use 0.8")
        if self.machine is not None:
            pairs = (self.target, Target()), (self.text, Text()), (self.sampling, Sampling())
            given = [name for own, usual in pairs for name in vars(own) if getattr(own, name) != getattr(usual, name)]
            if useless := [name for name in given if name not in SHAPE]:
                note_without_effect(useless, "costs are predicted: nothing is loaded or measured")
        elif self.alpha is None and self.target.load_format == "dummy":
            what, seen = "random weights have no acceptance", f"not given, with {flag('load_format')} dummy"
            raise ConfigError(what, flag("alpha"), seen, "an acceptance rate", f"add {flag('alpha')} 0.8")
