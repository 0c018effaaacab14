"""The law of the next token. Greedy is a mode of its own, not a small temperature."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kv_cache.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy: the lowest id among the largest logits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 or self.top_k != 0 or self.top_p != 1.0:
            raise ConfigError(
                "sampling is not available: decoding is greedy",
                where="SamplingParams",
                seen=f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}",
                required="temperature 0, top_k 0, top_p 1",
                fix="leave the sampling parameters at their defaults",
            )


def greedy(logits: Tensor) -> Tensor:
    """The largest logit's id: `[..., V] -> [...]` int64; ties go to the lowest id, as argmax promises."""
    return logits.argmax(dim=-1)
