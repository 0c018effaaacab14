"""Costs that `auto` chooses by: measured before a run, or kept from an earlier run."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.auto.costs import Costs
from bench.auto.measure import MEASURING_SECONDS, has_time, measure_costs, measure_for_decode, still_hold
from bench.auto.rehearsal import Rehearsal
from bench.auto.saved_costs import load_costs, store_costs
from bench.progress import BarProgress, progress_bar
from bench.session import Session
from bench.settings import nested, settings_record
from common.provenance import provenance
from engine.drafters import Drafter
from engine.drafters.combined import Combined

# Prompts whose lengths round to the same quarter of a power of two share their costs.
LENGTHS_PER_OCTAVE = 4


@dataclass(frozen=True)
class RunCosts:
    """Costs of rounds behind `context` tokens.

    by_rows: costs of each drafter, by the number of busy rows. seconds: duration of measuring or checking them. kept:
    True if an earlier run measured them.
    """

    context: int
    by_rows: Mapping[int, Sequence[Costs]]
    seconds: float
    kept: bool


def costs_of(
    session: Session, drafters: Sequence[Drafter], whole: bool = False, n_steps: int | None = None
) -> RunCosts | None:
    """Return the costs of a session's rounds, measured from the prefilled state; None if nothing is to be chosen.

    Models are measured without the text drafters beside them: a guess in every row would leave the model out. Every
    rank has to call this, and gets the leader's costs. whole: measure now, at every gamma, with all rows busy. n_steps:
    plain steps of the decode to come; None: derived from the session's prompts.
    """
    plan = session.plan
    if plan.draft is None or not plan.chooses:
        return None
    started, gammas, n_rows = time.perf_counter(), plan.draft.gammas, min(plan.n_rows, len(session.prompts))
    n_steps = n_steps or plan.gen_len * math.ceil(len(session.prompts) / n_rows)
    key = _key(session) | {"rows": n_rows}

    def known() -> dict[int, list[Costs]] | None:
        """Return the costs of an earlier run, unless it was too short to measure everything and this run is not."""
        if whole or plan.config.passes.measure_costs or not (found := load_costs(key)):
            return None
        few_rows = min(n_rows, session.runner.n_computed(1))
        is_partial = max(len(cost.at) for cost in found[n_rows]) < len(gammas) or few_rows not in found
        return None if is_partial and has_time(found[n_rows], drafters, gammas, n_steps) else found

    kept = session.ranks.shared(known)
    label = "costs" if whole else f"costs ({MEASURING_SECONDS:.0f} s or less)"
    with progress_bar(label, None) as bar:
        how = {**session.how, "gamma": gammas[-1], "progress": BarProgress(bar)}
        # Captured rounds always run the model, and are captured for the drafter that decodes.
        captures = session.runner.graphs is not None
        models = [each.model if isinstance(each, Combined) and not captures else each for each in drafters]
        rehearsal = Rehearsal(session.runner, models, session.prompts, **how)
        if kept and (checked := still_hold(kept, rehearsal)):
            return RunCosts(plan.prefix_len, checked, time.perf_counter() - started, kept=True)
        if whole:
            costs = {n_rows: measure_costs(rehearsal, gammas)}
        else:
            costs = measure_for_decode(rehearsal, gammas, n_steps)
    costs = session.ranks.shared(lambda: costs)
    if session.ranks.leads and not whole:
        store_costs(key, costs)
    return RunCosts(plan.prefix_len, costs, time.perf_counter() - started, kept=False)


def _key(session: Session) -> dict[str, Any]:
    """Return everything that the costs of a session's rounds depend on."""
    plan = session.plan
    assert plan.draft is not None
    sources = [source for source in (plan.target, plan.draft_source) if source]
    return {
        **settings_record(session),
        "seed": None,
        "models": [[asdict(source.config), source.manifest_sha256] for source in sources],
        "ranks": [plan.config.n_replicas, plan.group, plan.draft_group, session.target_ranks.all_reduce.name],
        "drafts": [[nested(level.config), nested(level.policies)] for level in plan.draft.levels],
        "gammas": plan.draft.gammas,
        "context": round(LENGTHS_PER_OCTAVE * math.log2(plan.prefix_len)),
        **provenance(),
    }
