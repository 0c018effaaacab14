"""Tables of the cost model, and the choice that pays best."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.auto.costs import tokens_per_round
from common.tables import Column, console
from cost_model.flags import Draft
from cost_model.grid import CostGrid
from engine.counts import acceptance_text

SHADES = " .:-=+*#%@"


class Acceptance(NamedTuple):
    """The acceptance rate of a draft, and its standard error where it was measured."""

    acceptance_rate: float
    acceptance_standard_error: float | None = None


# Acceptance by context (tokens) and draft.
Acceptances = Mapping[int, Mapping[Draft, Acceptance]]


def predict(grid: CostGrid, draft: Draft, gamma: int, acceptances: Acceptances, batch: int, context: int) -> float:
    """Return the speedup that a draft's acceptance at a context predicts."""
    tokens = tokens_per_round(acceptances[context][draft].acceptance_rate, gamma)
    return grid.at(batch, context, draft).speedup(tokens, gamma)


def best_of_each(grid: CostGrid, acceptances: Acceptances) -> list[dict[str, Any]]:
    """Return the choice with the largest predicted speedup at each batch and context; gamma 0 is plain decoding."""
    found = []
    for size in itertools.product(grid.batches, grid.contexts):
        choices: dict[tuple[str | None, int | None, int], float] = {(None, None, 0): 1.0}
        for draft, gamma in itertools.product(grid.drafts, grid.gammas):
            choices[*draft, gamma] = predict(grid, draft, gamma, acceptances, *size)
        best = max(choices, key=choices.__getitem__)
        names = "B", "prefix_len", "draft_policy", "draft_budget", "gamma", "predicted_speedup"
        found.append(dict(zip(names, (*size, *best, round(choices[best], 4)), strict=True)))
    return found


def cost_table(grid: CostGrid, draw: Callable[[Sequence[Any], Sequence[Column]], str] = console) -> str:
    """Return a line for each batch and context: ms of a plain step; verifications and draft steps in plain steps."""
    of_budget = sorted({budget: i for i, (_, budget) in enumerate(grid.drafts)}.items())
    rows = []
    for at in np.ndindex(grid.plain.shape):
        row = {"B": grid.batches[at[0]], "context": grid.contexts[at[1]], "plain ms": grid.plain[at]}
        row |= {f"verify g={gamma}": grid.verify[at][i] / grid.plain[at] for i, gamma in enumerate(grid.gammas)}
        rows.append(row | {f"draft b={budget}": grid.draft[at][i] / grid.plain[at] for budget, i in of_budget})
    formats = {"B": "", "context": "", "plain ms": ".1f"}
    return draw(rows, [Column(head, head, formats.get(head, ".2f")) for head in rows[0]])


def heat_map(grid: CostGrid, draft: Draft, acceptances: Acceptances) -> str:
    """Return the predicted speedups of a draft: a line per batch and context, a column per gamma, darker if larger."""
    rows, gains = [], {gamma: f"g={gamma}" for gamma in grid.gammas}
    for size in itertools.product(grid.batches, grid.contexts):
        row = {"B": size[0], "context": size[1], **acceptances[size[1]][draft]._asdict()}
        rows.append(row | {name: predict(grid, draft, gamma, acceptances, *size) for gamma, name in gains.items()})
    columns = [Column("B", "B"), Column("context", "context"), Column(acceptance_text, "acceptance")]
    columns += [Column(name, name, _shaded) for name in gains.values()]
    title = "predicted speedup, {} {} (darker is larger; below 1 plain decoding wins)".format(*draft)
    return f"{title}\n{console(rows, columns)}"


def _shaded(speedup: float) -> str:
    """Return a speedup behind two characters, blank at 0.5 and below, black at 2 and above."""
    shade = SHADES[round((min(max(speedup, 0.5), 2.0) - 0.5) / 1.5 * (len(SHADES) - 1))]
    return f"{2 * shade} {speedup:.2f}"


def best_table(best: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the rows of `best_of_each`."""
    plain = "none: plain decoding is faster"
    drafted = "{draft_policy} {draft_budget}, gamma {gamma}: {predicted_speedup:.2f}"
    said = Column(lambda row: (drafted if row["gamma"] else plain).format_map(row), "draft", align="<")
    return f"what pays best\n{console(best, [Column('B', 'B'), Column('prefix_len', 'context'), said])}"
