"""What the table of a run does not say by itself: why fields are empty, and which of its ratios are only noise."""

from __future__ import annotations

from typing import Any

from engine.bench.resolved import AUTO_GAMMA, ResolvedDraft
from kv_cache.policy import BudgetedPolicy

# Rounds below which one that was interrupted decides the ratio of two passes.
FEW_ROUNDS = 8


def notes(record: dict[str, Any], draft: ResolvedDraft | None) -> list[str]:
    """One sentence for each thing that the record of a run would be misread without; mostly none."""
    found = _contended(record)
    if record["gen_len"] == 1:
        found.append("nothing was timed: the first new token comes from the prompt; --gen_len 2 or more decodes")
    if not record["choices"] or draft is None:
        return found
    if draft.auto_gamma and draft.gamma < AUTO_GAMMA:
        found.append(f"gamma was chosen up to {draft.gamma}, not {AUTO_GAMMA}: {_room(draft)}")
    if record["measured_costs_seconds"]:
        found.append(
            f"measuring what rounds cost took {record['measured_costs_seconds']:.1f} s, which is in no speedup"
        )
    n_rounds, compared = record["steady_rounds"], record["speedup"] is not None
    if draft.automatic and draft.gamma and not any(choice["gamma"] for choice in record["choices"]):
        found.append("every round was a plain step" + (", so the speedups are noise" if compared else ""))
    elif compared and n_rounds < FEW_ROUNDS:
        found.append(f"too few rounds with all rows busy for a speedup, {n_rounds}; a longer --gen_len has more")
    return found


def _contended(record: dict[str, Any]) -> list[str]:
    busy = [
        f"{seen['threads_waiting'] + seen['stolen_processors']:.1f} during {name}"
        for name, seen in record["contention"].items()
        if seen["contended"]
    ]
    if not busy:
        return []
    return [f"threads waited for processors, {', '.join(busy)}: no time or speedup here is to be trusted"]


def _room(draft: ResolvedDraft) -> str:
    """What holds a round's tokens, and how many."""
    smallest = draft.of_capacity(min(draft.budgets or (draft.capacity,))).policy
    assert isinstance(smallest, BudgetedPolicy)
    return f"a budget of {smallest.budget} has room for {smallest.room} tokens of a round"
