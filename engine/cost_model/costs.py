"""What a round of speculation costs, and what speedup follows from it (MagicDec, arXiv 2408.11049)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from common.errors import ConfigError
from engine.counts import AcceptanceRate


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Expected tokens of a row per round, `(1 - alpha^(gamma + 1)) / (1 - alpha)`: Leviathan et al. 2023
    (arXiv 2211.17192), equation 1. alpha: the probability that a draft is accepted, given that those before it were."""
    return float(sum(alpha**position for position in range(gamma + 1)))


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one batch at one context: a plain step, verifications of so many drafts as in `at`, ascending, a
    draft step, what else a round takes, and its share of choosing entries anew. acceptance: of real text."""

    plain_ms: float
    at: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    other_ms: float
    acceptance: AcceptanceRate | None = None
    refresh_ms: float = 0.0

    def round_ms(self, gamma: int) -> float:
        """Of that gamma. Verifications between and beyond the measured ones, and plain steps, lie on straight lines."""
        at, ms = np.array([0, *self.at], dtype=float), np.array([self.plain_ms, *self.verify_ms])
        if gamma > at[-1]:
            verify = ms[-1] + (gamma - at[-1]) * (ms[-1] - ms[-2]) / (at[-1] - at[-2])
        else:
            verify = np.interp(gamma, at, ms)
        return gamma * self.draft_ms + float(verify) + self.other_ms + self.refresh_ms

    def catch_up_ms(self, n_missed: int) -> float:
        """Of a draft model, with tokens of every row: to a draft step as a verification of them is to a plain step."""
        per_token = max(0.0, self.verify_ms[-1] / self.plain_ms - 1) / self.at[-1]
        return self.draft_ms * (1 + n_missed * per_token)

    def slower(self, times: float) -> Self:
        """Where everything takes so many times as long."""
        verify_ms = tuple(times * ms for ms in self.verify_ms)
        others = ("plain_ms", "draft_ms", "other_ms", "refresh_ms")
        return replace(self, verify_ms=verify_ms, **{name: times * getattr(self, name) for name in others})

    def speedup(self, tokens: float, gamma: int) -> float:
        """Of rounds that emit so many tokens a row (see `tokens_per_round`) over plain decoding."""
        return tokens * self.plain_ms / self.round_ms(gamma)


@dataclass(frozen=True)
class CostGrid:
    """Costs, without `refresh_ms`, over ascending batches and contexts (tokens), for drafts named by (policy, budget).
    Milliseconds: `plain [B, S]`, `verify [B, S, G]`, `draft [B, S, D]`, `other [B, S]`."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    gammas: tuple[int, ...]
    drafts: tuple[tuple[str, int], ...]
    plain: np.ndarray
    verify: np.ndarray
    draft: np.ndarray
    other: np.ndarray

    @classmethod
    def of(cls, drafts: Sequence[tuple[str, int]], cells: Mapping[tuple[int, int], Sequence[Costs]]) -> Self:
        """`cells[batch, context]`: the costs of each of the drafts there; they differ in the draft step alone."""
        batches, contexts = (tuple(sorted(set(sizes))) for sizes in zip(*cells, strict=True))

        def table(values: Callable[[Sequence[Costs]], Any]) -> np.ndarray:
            return np.array([[values(cells[batch, context]) for context in contexts] for batch in batches])

        return cls(
            batches=batches,
            contexts=contexts,
            gammas=cells[batches[0], contexts[0]][0].at,
            drafts=tuple(drafts),
            plain=table(lambda cell: cell[0].plain_ms),
            verify=table(lambda cell: cell[0].verify_ms),
            draft=table(lambda cell: [costs.draft_ms for costs in cell]),
            other=table(lambda cell: cell[0].other_ms),
        )

    def record(self, prefix: str = "", parts: Sequence[str] = ("plain", "verify", "draft", "other")) -> dict[str, Any]:
        """As JSON has it. prefix: of the names of its milliseconds. parts: those that are known."""
        drafts = [{"draft_policy": policy, "draft_budget": budget} for policy, budget in self.drafts]
        sizes = {"batches": self.batches, "contexts": self.contexts, "gammas": self.gammas, "drafts": drafts}
        return sizes | {f"{prefix}{part}_ms": getattr(self, part).round(4).tolist() for part in parts}

    def at(self, batch: int, context: int, draft: tuple[str, int]) -> Costs:
        """Interpolated between the measured batches and contexts. Errors: ConfigError for what was not measured."""
        known = self.batches[0] <= batch <= self.batches[-1] and self.contexts[0] <= context <= self.contexts[-1]
        if draft not in self.drafts or not known:
            what, seen = "costs of this were not measured", f"{draft}, {batch} rows of {context} tokens"
            required = f"one of {self.drafts}, batches {self.batches}, contexts {self.contexts}, or between"
            raise ConfigError(what, "CostGrid.at", seen, required, "measure a grid that has it")
        weights = np.outer(interpolating(batch, self.batches), interpolating(context, self.contexts))
        plain, verify, of_drafts, other = (
            np.tensordot(weights, ms, axes=2).tolist() for ms in (self.plain, self.verify, self.draft, self.other)
        )
        return Costs(plain, self.gammas, tuple(verify), of_drafts[self.drafts.index(draft)], other)


def interpolating(size: float, measured: Sequence[int]) -> list[float]:
    """Return how much what was measured at each of those sizes counts at another one, on the line between its
    neighbours; beyond them the nearest one counts alone."""
    return [float(np.interp(size, measured, only)) for only in np.eye(len(measured))]
