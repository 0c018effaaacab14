"""What the cost model says: measured costs and acceptance, and the speedups that follow from them."""

from __future__ import annotations

from common.jsonl import publish
from common.provenance import provenance
from engine.acceptance import AcceptanceRate
from engine.bench.cost_flags import CostFlags
from engine.bench.cost_grid import measure_acceptance, measure_grid, open_largest
from engine.bench.cost_tables import Acceptances, acceptance_table, best_of, best_table, cost_table, heat_map
from engine.bench.record import settings_record
from engine.cost_model.costs import CostGrid

# Settings that a grid has several of.
VARIED = ("gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")


def report(flags: CostFlags) -> None:
    """Measure, predict, print and record. Errors: UserError."""
    session, contexts, is_measured = open_largest(flags), flags.sorted("contexts"), flags.alpha is None
    acceptances: Acceptances
    if flags.alpha is None:
        acceptances = {context: measure_acceptance(session, flags, context) for context in contexts}
    else:
        acceptances = dict.fromkeys(contexts, dict.fromkeys(flags.configs(), AcceptanceRate(flags.alpha)))
    grid = measure_grid(session, flags)
    best = [best_of(grid, batch, context, acceptances) for batch in grid.batches for context in grid.contexts]
    record = {
        "benchmark": "cost_model",
        "model": session.name,
        "load_format": flags.target.load_format,
        "dataset": session.plan.dataset if is_measured else None,
        **{name: value for name, value in settings_record(session).items() if name not in VARIED},
        **grid_record(grid),
        **acceptance_record(acceptances),
        "acceptance_of": "the data set's own text behind each context" if is_measured else "given",
        "best": best,
        **provenance(),
    }
    tables = [f"\n{cost_table(grid)}", *([acceptance_table(acceptances)] if is_measured else ())]
    tables += [*(heat_map(grid, draft, acceptances) for draft in grid.drafts), best_table(best)]
    publish(flags.output.output, record, *(f"{table}\n" for table in tables))


def acceptance_record(acceptances: Acceptances) -> dict[str, object]:
    """For a JSON record: rates and verified positions `[D][S]`, by draft and context; of given rates no counts."""
    rows = list(zip(*(at_context.values() for at_context in acceptances.values()), strict=True))
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
