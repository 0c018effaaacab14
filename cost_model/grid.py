"""CostGrid: costs over a grid of batches and contexts, and interpolated between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bench.auto.costs import Costs, interpolating
from common.errors import ConfigError


@dataclass(frozen=True)
class CostGrid:
    """Costs, without `refresh_ms`, over ascending batches and contexts (tokens), for drafts named by (policy, budget).

    Milliseconds: `plain [B, S]`, `verify [B, S, G]`, `draft [B, S, D]`, `other [B, S]`, `fixed_ms` included.
    """

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
        """Make a grid of `cells[batch, context]`: the costs of each draft, which differ only in the draft step."""
        batches, contexts = (tuple(sorted(set(sizes))) for sizes in zip(*cells, strict=True))
        rows = [[cells[batch, context] for context in contexts] for batch in batches]
        plain = np.array([[cell[0].plain_ms for cell in row] for row in rows])
        verify = np.array([[cell[0].verify_ms for cell in row] for row in rows])
        other = np.array([[cell[0].fixed_ms + cell[0].other_ms for cell in row] for row in rows])
        draft = np.array([[[costs.draft_ms for costs in cell] for cell in row] for row in rows])
        return cls(batches, contexts, rows[0][0][0].at, tuple(drafts), plain, verify, draft, other)

    def record(self, prefix: str = "", parts: Sequence[str] = ("plain", "verify", "draft", "other")) -> dict[str, Any]:
        """Return the grid as JSON values. prefix: before the names of costs. parts: the known costs."""
        drafts = [{"draft_policy": policy, "draft_budget": budget} for policy, budget in self.drafts]
        sizes = {"batches": self.batches, "contexts": self.contexts, "gammas": self.gammas, "drafts": drafts}
        return sizes | {f"{prefix}{part}_ms": getattr(self, part).round(4).tolist() for part in parts}

    def at(self, batch: int, context: int, draft: tuple[str, int]) -> Costs:
        """Return costs interpolated between batches and contexts. Errors: ConfigError outside of the grid."""
        known = self.batches[0] <= batch <= self.batches[-1] and self.contexts[0] <= context <= self.contexts[-1]
        if draft not in self.drafts or not known:
            what, seen = "costs of this were not measured", f"{draft}, {batch} rows of {context} tokens"
            required = f"one of {self.drafts}, batches {self.batches}, contexts {self.contexts}, or between"
            raise ConfigError(what, "CostGrid.at", seen, required, "measure a grid that has it")
        weights = np.outer(interpolating(batch, self.batches), interpolating(context, self.contexts))
        each = (self.plain, self.verify, self.draft, self.other)
        plain, verify, drafts, other = (np.tensordot(weights, ms, axes=2).tolist() for ms in each)
        return Costs(plain, self.gammas, tuple(verify), drafts[self.drafts.index(draft)], other)
