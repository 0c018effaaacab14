"""What a round of speculation costs, and what speedup follows from it (MagicDec, arXiv 2408.11049)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import ConfigError
from engine.acceptance import AcceptanceRate


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Expected tokens of a row per round, `(1 - alpha^(gamma + 1)) / (1 - alpha)`: Leviathan et al. 2023
    (arXiv 2211.17192), equation 1. Summed as 1 + alpha + ... + alpha^gamma, which divides by nothing.

    alpha: the probability that a draft is accepted, given that those before it were, the same for every draft.
    Errors: ConfigError.
    """
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ConfigError(
            "rounds of no such acceptance rate or gamma",
            where="tokens_per_round: alpha, gamma",
            seen=f"{alpha}, {gamma}",
            required="0 <= alpha <= 1, gamma >= 0",
            fix="divide accepted drafts by verified ones; gamma 0 is plain decoding",
        )
    return float(sum(alpha**position for position in range(gamma + 1)))


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one batch at one context, for one way to draft.

    plain_ms: a step of plain decoding. verify_ms: a verification of gamma drafts, at the gammas `at`, ascending.
    draft_ms: one step of the draft. other_ms: what else a round takes. acceptance: what was seen meanwhile, of real
    text.
    """

    plain_ms: float
    at: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    other_ms: float
    acceptance: AcceptanceRate | None = None

    def round_ms(self, gamma: int) -> float:
        """A round of that gamma. Verifications between and beyond the measured gammas lie on straight lines, below
        them on the line from a plain step, which is a verification of nothing.
        """
        at, ms = np.array([0, *self.at], dtype=float), np.array([self.plain_ms, *self.verify_ms])
        if gamma > at[-1]:
            verify = ms[-1] + (gamma - at[-1]) * (ms[-1] - ms[-2]) / (at[-1] - at[-2])
        else:
            verify = np.interp(gamma, at, ms)
        return gamma * self.draft_ms + float(verify) + self.other_ms

    def speedup(self, tokens: float, gamma: int) -> float:
        """Of rounds that emit so many tokens a row (see `tokens_per_round`) over plain decoding."""
        return tokens * self.plain_ms / self.round_ms(gamma)


@dataclass(frozen=True)
class CostGrid:
    """Costs over batches and contexts (tokens), both ascending, for drafts named by (policy, budget).

    Milliseconds: `plain [B, S]`, `verify [B, S, G]`, `draft [B, S, D]`, `other [B, S]`.
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
    def of(
        cls,
        batches: Sequence[int],
        contexts: Sequence[int],
        drafts: Sequence[tuple[str, int]],
        cells: Sequence[Sequence[Sequence[Costs]]],
    ) -> CostGrid:
        """`cells[b][s][d]`: the costs of that batch, context and draft."""

        def table(values) -> np.ndarray:
            return np.array([[values(cell) for cell in row] for row in cells], dtype=float)

        return cls(
            batches=tuple(batches),
            contexts=tuple(contexts),
            gammas=cells[0][0][0].at,
            drafts=tuple(drafts),
            plain=table(lambda cell: cell[0].plain_ms),
            verify=table(lambda cell: cell[0].verify_ms),
            draft=table(lambda cell: [costs.draft_ms for costs in cell]),
            other=table(lambda cell: cell[0].other_ms),
        )

    def at(self, batch: int, context: int, draft: tuple[str, int]) -> Costs:
        """Interpolated between the measured batches and contexts. Errors: ConfigError for what was not measured."""
        if draft not in self.drafts:
            raise _unmeasured("draft", draft, self.drafts)
        for value, measured, name in ((batch, self.batches, "batch"), (context, self.contexts, "context")):
            if not measured[0] <= value <= measured[-1]:
                raise _unmeasured(name, value, f"{measured[0]} to {measured[-1]}")

        def between(values: np.ndarray) -> np.ndarray:
            """`[B, S, ...] -> [...]`."""
            in_batches = np.apply_along_axis(lambda row: np.interp(context, self.contexts, row), 1, values)
            return np.apply_along_axis(lambda column: np.interp(batch, self.batches, column), 0, in_batches)

        return Costs(
            plain_ms=float(between(self.plain)),
            at=self.gammas,
            verify_ms=tuple(map(float, between(self.verify))),
            draft_ms=float(between(self.draft)[self.drafts.index(draft)]),
            other_ms=float(between(self.other)),
        )


def _unmeasured(name: str, value: object, measured: object) -> ConfigError:
    return ConfigError(
        f"costs of this {name} were not measured",
        where=f"CostGrid.at: {name}",
        seen=value,
        required=measured,
        fix=f"measure a grid that has this {name}",
    )
