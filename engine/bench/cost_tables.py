"""What a measured grid of costs predicts: the tables of the cost model, and what pays best."""

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from common.tables import Column, console
from engine.bench.cost_flags import Draft
from engine.cost_model.costs import CostGrid, tokens_per_round

SHADES = " .:-=+*#%@"

# The acceptance rate of every draft, by context (tokens).
Acceptances = Mapping[int, Mapping[Draft, float]]


def predict(grid: CostGrid, draft: Draft, gamma: int, acceptances: Acceptances, batch: int, context: int) -> float:
    """The speedup, from the draft's acceptance at that context, which is one of those that it was measured at."""
    tokens = tokens_per_round(acceptances[context][draft], gamma)
    return grid.at(batch, context, draft).speedup(tokens, gamma)


def best_of_each(grid: CostGrid, acceptances: Acceptances) -> list[dict[str, Any]]:
    """What has the largest predicted speedup at each batch and context: gamma 0 and no draft is plain decoding."""
    found = []
    for size in itertools.product(grid.batches, grid.contexts):
        choices: dict[tuple[str | None, int | None, int], float] = {(None, None, 0): 1.0}
        for draft, gamma in itertools.product(grid.drafts, grid.gammas):
            choices[*draft, gamma] = predict(grid, draft, gamma, acceptances, *size)
        best = max(choices, key=choices.__getitem__)
        names = "B", "prefix_len", "draft_policy", "draft_budget", "gamma", "predicted_speedup"
        found.append(dict(zip(names, (*size, *best, round(choices[best], 4)), strict=True)))
    return found


def cost_columns(grid: CostGrid) -> list[Column]:
    """Plain steps, and verifications and draft steps as shares of them, by the indices of a batch and a context."""

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
            lambda size: predict(grid, draft, gamma, acceptances, *size),
            f"g={gamma}",
            lambda speedup: f"{_shade(speedup)} {speedup:.2f}",
        )

    columns = [
        Column(itemgetter(0), "B"),
        Column(itemgetter(1), "context"),
        Column(lambda size: acceptances[size[1]][draft], "acceptance", ".3f"),
        *map(predicted, grid.gammas),
    ]
    policy, budget = draft
    title = f"predicted speedup, {policy} {budget} (darker is larger; below 1 plain decoding wins)"
    return f"{title}\n{console(itertools.product(grid.batches, grid.contexts), columns)}"


def _shade(speedup: float) -> str:
    """Two characters: blank at 0.5 and below, black at 2 and above."""
    return 2 * SHADES[round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))]


def best_table(best: Sequence[Mapping[str, Any]]) -> str:
    """What pays best at each batch and context, from the rows of `best_of`."""
    plain = "none: plain decoding is faster"
    drafted = "{draft_policy} {draft_budget}, gamma {gamma}: {predicted_speedup:.2f}"
    said = Column(lambda row: (drafted if row["gamma"] else plain).format_map(row), "draft", align="<")
    return f"what pays best\n{console(best, [Column('B', 'B'), Column('prefix_len', 'context'), said])}"
