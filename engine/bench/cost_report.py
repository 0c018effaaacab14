"""What the cost model says: measured costs and acceptance, and the speedups that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

from common.jsonl import publish
from common.provenance import provenance
from engine.acceptance import AcceptanceRate
from engine.bench.cost_flags import CostFlags, Draft
from engine.bench.cost_grid import measure_acceptance, measure_grid, open_largest
from engine.bench.cost_tables import Acceptances, acceptance_table, best_of, best_table, cost_table, heat_map
from engine.bench.record import settings_record
from engine.cost_model.costs import CostGrid

# Settings that a grid has several of.
VARIED = ("gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")


def report(flags: CostFlags) -> None:
    """Measure, predict, print and record. Errors: UserError."""
    session = open_largest(flags)
    contexts, gammas = flags.sorted("contexts"), flags.sorted("gammas")
    acceptances: Acceptances
    if flags.alpha is not None:
        acceptances = dict.fromkeys(contexts, dict.fromkeys(flags.drafts, AcceptanceRate(flags.alpha)))
    else:
        acceptances = {context: measure_acceptance(session, flags, context) for context in contexts}
    grid = measure_grid(session, flags)
    best = [
        {"B": batch, "prefix_len": context, **best_of(grid, batch, context, acceptances, gammas)}
        for batch in grid.batches
        for context in grid.contexts
    ]
    record = {
        "benchmark": "cost_model",
        "model": session.name,
        "load_format": flags.target.load_format,
        "dataset": session.plan.dataset if flags.alpha is None else None,
        **{name: value for name, value in settings_record(session).items() if name not in VARIED},
        **grid_record(grid),
        **acceptance_record(flags.drafts, acceptances),
        "acceptance_of": "the data set's own text behind each context" if flags.alpha is None else "given",
        "best": best,
        **provenance(),
    }
    tables = [f"\n{cost_table(grid)}"]
    if flags.alpha is None:
        tables.append(acceptance_table(flags.drafts, acceptances))
    tables += [heat_map(grid, draft, acceptances, gammas) for draft in grid.drafts]
    publish(flags.output.output, record, *(f"{table}\n" for table in [*tables, best_table(best)]))


def acceptance_record(drafts: Sequence[Draft], acceptances: Acceptances) -> dict[str, object]:
    """For a JSON record: rates and verified positions `[D][S]`, by draft and context; of given rates no counts."""
    rows = [[at_context[draft] for at_context in acceptances.values()] for draft in drafts]
    verified = [[acceptance.n for acceptance in row] for row in rows]
    return {
        "acceptance_rates_by_context": [[round(acceptance.value, 4) for acceptance in row] for row in rows],
        "acceptance_judged_by_context": None if None in verified[0] else verified,
    }


def grid_record(grid: CostGrid) -> dict[str, object]:
    """The measured grid, for a JSON record."""
    return {
        "batches": grid.batches,
        "contexts": grid.contexts,
        "gammas": grid.gammas,
        "drafts": [{"draft_policy": policy, "draft_budget": budget} for policy, budget in grid.drafts],
        **{f"{name}_ms": getattr(grid, name).round(4).tolist() for name in ("plain", "verify", "draft", "other")},
    }
