"""Costs over a grid of batches and contexts, measured or predicted, and between the points of that grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bench.auto.costs import Costs, interpolating
from common.errors import ConfigError


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
