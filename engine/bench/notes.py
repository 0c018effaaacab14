"""What the table of a run does not say by itself: why fields are empty, and which of its ratios are only noise."""

from __future__ import annotations

from typing import Any

from engine.bench.resolved import AUTO_GAMMA, ResolvedDraft
from kv_cache.policy import BudgetedPolicy

# Rounds below which one that was interrupted decides the ratio of two passes.
FEW_ROUNDS = 8


def notes(record: dict[str, Any], draft: ResolvedDraft | None) -> list[str]:
    """One sentence for each thing that the record of a run would be misread without; mostly none."""
    found = []
    if waited := {name: seen for name, seen in record["contention"].items() if seen["contended"]}:
        each = (
            f"{one['threads_waiting'] + one['stolen_processors']:.1f} during {name}" for name, one in waited.items()
        )
        found.append(f"threads waited for processors, {', '.join(each)}: no time or speedup here is to be trusted")
    if record["gen_len"] == 1:
        found.append("nothing was timed: the first new token comes from the prompt; --gen_len 2 or more decodes")
    if not record["choices"] or draft is None:
        return found
    if draft.auto_gamma and draft.gamma < AUTO_GAMMA:
        smallest = draft.of_capacity(draft.capacities[-1]).policy
        assert isinstance(smallest, BudgetedPolicy)
        room = f"a budget of {smallest.budget} has room for {smallest.room} tokens of a round"
        found.append(f"gamma was chosen up to {draft.gamma}, not {AUTO_GAMMA}: {room}")
    if seconds := record["measured_costs_seconds"]:
        found.append(f"measuring what rounds cost took {seconds:.1f} s, which is in no speedup")
    n_rounds, compared = record["steady_rounds"], record["speedup"] is not None
    if draft.automatic and draft.gamma and not any(choice["gamma"] for choice in record["choices"]):
        found.append("every round was a plain step" + (", so the speedups are noise" if compared else ""))
    elif compared and n_rounds < FEW_ROUNDS:
        found.append(f"too few rounds with all rows busy for a speedup, {n_rounds}; a longer --gen_len has more")
    return found
