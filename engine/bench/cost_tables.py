"""What a measured grid of costs predicts: the tables of the cost model, and what pays best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.acceptance import AcceptanceRate
from engine.bench.cost_grid import Draft
from engine.cost_model.costs import CostGrid, tokens_per_round

SHADES = " .:-=+*#%@"
NOISE = "within noise: closer than one standard error of acceptance moves them; the noise of the costs is not in it"

# The acceptance of every draft, by context (tokens).
Acceptances = Mapping[int, Mapping[Draft, AcceptanceRate]]


@dataclass(frozen=True)
class Prediction:
    """The predicted speedup of one choice at a batch and a context; no draft and gamma 0 for plain decoding.

    error: how far one standard error of the draft's acceptance moves it. That of the costs is not in it.
    """

    draft: Draft | None
    gamma: int
    speedup: float
    error: float


NO_DRAFT = Prediction(draft=None, gamma=0, speedup=1.0, error=0.0)


def best_of(
    grid: CostGrid, batch: int, context: int, acceptances: Acceptances, gammas: Sequence[int]
) -> dict[str, object]:
    """The draft and gamma with the largest predicted speedup; gamma 0 and no draft where plain decoding is faster.

    `within_noise_of`: the best of the other choices that acceptance does not tell from it, or None.
    """
    drafted = (predict(grid, batch, context, draft, acceptances, gamma) for draft in grid.drafts for gamma in gammas)
    best, *others = sorted([NO_DRAFT, *drafted], key=lambda choice: choice.speedup, reverse=True)
    near = next((other for other in others if is_within_noise(best, other)), None)
    return {**_choice_record(best), "within_noise_of": near and _choice_record(near)}


def predict(grid: CostGrid, batch: int, context: int, draft: Draft, acceptances: Acceptances, gamma: int) -> Prediction:
    """From the draft's acceptance at that context, which is one of those that acceptance was measured at."""
    costs, acceptance = grid.at(batch, context, draft), acceptances[context][draft]
    speedup = costs.speedup(tokens_per_round(acceptance.value, gamma), gamma)
    return Prediction(draft, gamma, speedup, error=costs.speedup(acceptance.tokens_error(gamma), gamma))


def is_within_noise(one: Prediction, other: Prediction) -> bool:
    """Whether two choices differ by less than one standard error of acceptance moves their difference.

    The gammas of one draft move together, by its one acceptance; those of two drafts are taken as independent.
    """
    if one.draft == other.draft:
        noise = abs(one.error - other.error)
    else:
        noise = math.hypot(one.error, other.error)
    return abs(one.speedup - other.speedup) < noise


def _choice_record(choice: Prediction) -> dict[str, object]:
    policy, budget = choice.draft or (None, None)
    speedup = round(choice.speedup, 4)
    return {"draft_policy": policy, "draft_budget": budget, "gamma": choice.gamma, "predicted_speedup": speedup}


def acceptance_table(drafts: Sequence[Draft], acceptances: Acceptances) -> str:
    """Measured acceptance with its standard error (see `AcceptanceRate`): a line per draft and context."""
    lines = [
        "acceptance, and its standard error if drafts were independent: a lower bound",
        f"{'draft':<16}{'context':>9}{'acceptance':>16}{'judged':>9}",
    ]
    for draft in drafts:
        for context, at_context in acceptances.items():
            acceptance = at_context[draft]
            rate = f"{acceptance.value:.3f} ± {acceptance.standard_error:.3f}"
            lines.append(f"{_draft_name(*draft):<16}{context:>9}{rate:>16}{acceptance.n:>9}")
    return "\n".join(lines)


def _draft_name(policy: object, budget: object) -> str:
    return f"{policy} {budget}"


def cost_table(grid: CostGrid) -> str:
    """Milliseconds of plain steps, and verifications and draft steps as shares of them."""
    budgets = sorted({budget for _, budget in grid.drafts})
    draft_of = {budget: next(i for i, (_, b) in enumerate(grid.drafts) if b == budget) for budget in budgets}
    head = [f"{'B':>4}{'context':>9}{'plain ms':>10}"]
    head += [f"{f'verify g={gamma}':>12}" for gamma in grid.gammas]
    head += [f"{f'draft b={budget}':>14}" for budget in budgets]
    lines = ["costs; verification and draft step in plain steps", "".join(head)]
    for i, batch in enumerate(grid.batches):
        for j, context in enumerate(grid.contexts):
            plain = grid.plain[i, j]
            line = f"{batch:>4}{context:>9}{plain:>10.1f}"
            line += "".join(f"{ms / plain:>12.2f}" for ms in grid.verify[i, j])
            line += "".join(f"{grid.draft[i, j, draft_of[budget]] / plain:>14.2f}" for budget in budgets)
            lines.append(line)
    return "\n".join(lines)


def heat_map(grid: CostGrid, draft: Draft, acceptances: Acceptances, gammas: Sequence[int]) -> str:
    """Predicted speedups of one draft: a line per batch and context, a column per gamma, darker where larger."""
    lines = [
        f"predicted speedup, {_draft_name(*draft)} (darker is larger; below 1 plain decoding wins)",
        f"{'B':>4}{'context':>9}{'acceptance':>12}" + "".join(f"{f'g={gamma}':>9}" for gamma in gammas),
    ]
    for batch in grid.batches:
        for context in grid.contexts:
            choices = [predict(grid, batch, context, draft, acceptances, gamma) for gamma in gammas]
            cells = (f"{_shade(choice.speedup)} {choice.speedup:.2f}" for choice in choices)
            rate = f"{acceptances[context][draft].value:.3f}"
            lines.append(f"{batch:>4}{context:>9}{rate:>12}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _shade(speedup: float) -> str:
    """Two characters: blank at 0.5 and below, black at 2 and above."""
    place = round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))
    return 2 * SHADES[place]


def best_table(best: Sequence[Mapping[str, object]]) -> str:
    """What pays best at each batch and context, from the rows of `best_of`; and what it may be no better than."""
    lines = ["what pays best", f"{'B':>4}{'context':>9}  draft"]
    for row in best:
        draft = (
            f"{_choice_name(row)}: {row['predicted_speedup']:.2f}" if row["gamma"] else "none: plain decoding is faster"
        )
        near = row["within_noise_of"]
        remark = f" (within noise of {_choice_name(near)})" if isinstance(near, Mapping) else ""
        lines.append(f"{row['B']:>4}{row['prefix_len']:>9}  {draft}{remark}")
    if any(row["within_noise_of"] for row in best):
        lines.append(NOISE)
    return "\n".join(lines)


def _choice_name(choice: Mapping[str, object]) -> str:
    if not choice["gamma"]:
        return "plain decoding"
    return f"{_draft_name(choice['draft_policy'], choice['draft_budget'])}, gamma {choice['gamma']}"
