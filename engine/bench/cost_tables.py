"""What a measured grid of costs predicts: the tables of the cost model, and what pays best."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from common.tables import Column, console
from engine.acceptance import AcceptanceRate
from engine.bench.cost_flags import Draft
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

    @property
    def record(self) -> dict[str, object]:
        policy, budget = self.draft or (None, None)
        speedup = round(self.speedup, 4)
        return {"draft_policy": policy, "draft_budget": budget, "gamma": self.gamma, "predicted_speedup": speedup}


def best_of(grid: CostGrid, batch: int, context: int, acceptances: Acceptances) -> dict[str, object]:
    """The draft and gamma with the largest predicted speedup there; gamma 0 and no draft where plain decoding is
    faster. `within_noise_of`: the best of the other choices that acceptance does not tell from it, or None."""
    choices = [Prediction(draft=None, gamma=0, speedup=1.0, error=0.0)]
    for draft, gamma in itertools.product(grid.drafts, grid.gammas):
        choices.append(predict(grid, draft, gamma, acceptances, batch, context))
    best, *others = sorted(choices, key=lambda choice: choice.speedup, reverse=True)
    near = next((other.record for other in others if is_within_noise(best, other)), None)
    return {"B": batch, "prefix_len": context, **best.record, "within_noise_of": near}


def predict(grid: CostGrid, draft: Draft, gamma: int, acceptances: Acceptances, batch: int, context: int) -> Prediction:
    """From the draft's acceptance at that context, which is one of those that acceptance was measured at."""
    costs, acceptance = grid.at(batch, context, draft), acceptances[context][draft]
    speedup = costs.speedup(tokens_per_round(acceptance.value, gamma), gamma)
    return Prediction(draft, gamma, speedup, error=costs.speedup(acceptance.tokens_error(gamma), gamma))


def is_within_noise(one: Prediction, other: Prediction) -> bool:
    """Whether one standard error of acceptance moves their difference further than it is. The gammas of one draft move
    together, by its one acceptance; those of two drafts are taken as independent."""
    together = one.draft == other.draft
    noise = abs(one.error - other.error) if together else math.hypot(one.error, other.error)
    return abs(one.speedup - other.speedup) < noise


def acceptance_table(acceptances: Acceptances) -> str:
    """Measured acceptance with its standard error (see `AcceptanceRate`): a line per draft and context."""
    drafts = next(iter(acceptances.values()))
    rows = [(draft, context, at[draft]) for draft in drafts for context, at in acceptances.items()]
    columns = [
        Column(lambda row: _draft_name(*row[0]), "draft", align="<"),
        Column(itemgetter(1), "context"),
        Column(lambda row: f"{row[2].value:.3f} ± {row[2].standard_error:.3f}", "acceptance"),
        Column(lambda row: row[2].n, "verified positions"),
    ]
    title = "acceptance, and its standard error if drafts were independent: a lower bound"
    return f"{title}\n{console(rows, columns)}"


def _draft_name(policy: object, budget: object) -> str:
    return f"{policy} {budget}"


def cost_columns(grid: CostGrid) -> list[Column]:
    """Milliseconds of plain steps, and verifications and draft steps as shares of them, by the indices of a batch and a
    context."""

    def share(costs: np.ndarray, place: int, head: str) -> Column:
        return Column(lambda at: costs[at][place] / grid.plain[at], head, ".2f")

    index = {budget: i for i, (_, budget) in enumerate(grid.drafts)}
    return [
        Column(lambda at: grid.batches[at[0]], "B"),
        Column(lambda at: grid.contexts[at[1]], "context"),
        Column(lambda at: grid.plain[at], "plain ms", ".1f"),
        *(share(grid.verify, i, f"verify g={gamma}") for i, gamma in enumerate(grid.gammas)),
        *(share(grid.draft, i, f"draft b={budget}") for budget, i in sorted(index.items())),
    ]


def cost_table(grid: CostGrid) -> str:
    table = console(np.ndindex(grid.plain.shape), cost_columns(grid))
    return f"costs; verification and draft step in plain steps\n{table}"


def heat_map(grid: CostGrid, draft: Draft, acceptances: Acceptances) -> str:
    """Predicted speedups of one draft: a line per batch and context, a column per gamma, darker where larger."""

    def predicted(gamma: int) -> Column:
        return Column(
            lambda size: predict(grid, draft, gamma, acceptances, *size).speedup,
            f"g={gamma}",
            lambda speedup: f"{_shade(speedup)} {speedup:.2f}",
        )

    columns = [
        Column(itemgetter(0), "B"),
        Column(itemgetter(1), "context"),
        Column(lambda size: acceptances[size[1]][draft].value, "acceptance", ".3f"),
        *map(predicted, grid.gammas),
    ]
    title = f"predicted speedup, {_draft_name(*draft)} (darker is larger; below 1 plain decoding wins)"
    return f"{title}\n{console(itertools.product(grid.batches, grid.contexts), columns)}"


def _shade(speedup: float) -> str:
    """Two characters: blank at 0.5 and below, black at 2 and above."""
    return 2 * SHADES[round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))]


def best_table(best: Sequence[Mapping[str, Any]]) -> str:
    """What pays best at each batch and context, from the rows of `best_of`; and what it may be no better than."""
    columns = [Column("B", "B"), Column("prefix_len", "context"), Column(_best, "draft", align="<")]
    table = f"what pays best\n{console(best, columns)}"
    return f"{table}\n{NOISE}" if any(row["within_noise_of"] for row in best) else table


def _best(row: Mapping[str, Any]) -> str:
    near = row["within_noise_of"]
    said = f"{_choice_name(row)}: {row['predicted_speedup']:.2f}" if row["gamma"] else "none: plain decoding is faster"
    return f"{said} (within noise of {_choice_name(near)})" if near else said


def _choice_name(choice: Mapping[str, Any]) -> str:
    if not choice["gamma"]:
        return "plain decoding"
    return f"{_draft_name(choice['draft_policy'], choice['draft_budget'])}, gamma {choice['gamma']}"
