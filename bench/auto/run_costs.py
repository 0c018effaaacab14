"""What `auto` chooses by: the costs of this run's rounds, measured before it or kept from an earlier run."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bench.auto.costs import Costs
from bench.auto.measure import MEASURING_SECONDS, measure_costs, measure_for_decode, scope, still_hold
from bench.auto.rehearsal import Rehearsal
from bench.auto.saved_costs import load_costs, store_costs
from bench.progress import BarProgress, progress_bar
from bench.session import Session
from bench.settings import settings_record
from common.provenance import provenance
from engine.drafters import Drafter
from engine.pacing import Choice
from engine.stats import RoundStats

# Prompts of about one length share their costs: those that round to the same quarter of a power of two.
LENGTHS_PER_OCTAVE = 4
# A round that takes so many times what costs predict was held up by something else.
HELD_UP = 2.0


@dataclass(frozen=True)
class RunCosts:
    """by_rows: of each drafter, while so many rows decode, behind `context` tokens. seconds: of measuring them, or of
    checking kept ones."""

    context: int
    by_rows: Mapping[int, Sequence[Costs]]
    seconds: float
    kept: bool

    def held_up(self, rounds: Sequence[RoundStats]) -> int:
        """How many rounds with all rows took over twice these costs; none that may have begun by catching up."""
        n_rows, costs = max(self.by_rows.items())

        def predicted(choice: Choice) -> float:
            return costs[0].plain_ms if choice.drafter is None else costs[choice.drafter].round_ms(choice.gamma)

        went_on = (now for last, now in pairwise(rounds) if now.choice.drafter in (None, last.choice.drafter))
        return sum(one.busy == n_rows and 1e3 * one.seconds > HELD_UP * predicted(one.choice) for one in went_on)


def costs_of(
    session: Session, drafters: Sequence[Drafter], whole: bool = False, n_steps: int | None = None
) -> RunCosts | None:
    """From the prefilled state, where something is to be chosen: by every rank, and the first one's on all. whole: now,
    at every gamma, while all rows decode. n_steps: of the decode without speculation; None: by the session's prompts.
    """
    if session.draft is None or not session.chooses:
        return None
    started, gammas, n_rows = time.perf_counter(), session.draft.gammas, min(session.n_rows, len(session.prompts))
    n_steps = n_steps or session.gen_len * math.ceil(len(session.prompts) / n_rows)
    key = _key(session) | {"rows": n_rows}

    def known() -> dict[int, list[Costs]] | None:
        """What was kept, unless this run has the time to measure more."""
        if whole or session.config.passes.measure_costs or not (found := load_costs(key)):
            return None
        wanted = scope(found[n_rows], gammas, n_steps, session.runner.n_computed(1) < n_rows)
        is_less = wanted.few_rows > (len(found) > 1) or not {*wanted.gammas} <= {*found[n_rows][0].at}
        return None if is_less else found

    kept = session.ranks.shared(known)
    with progress_bar(f"costs (aiming at {MEASURING_SECONDS:.0f} s or less)", None) as bar:
        how = {**session.how, "gamma": gammas[-1], "progress": BarProgress(bar)}
        rehearsal = Rehearsal(session.runner, drafters, session.prompts, **how)
        if kept and (checked := still_hold(kept, rehearsal)):
            return RunCosts(session.prefix_len, checked, time.perf_counter() - started, kept=True)
        if whole:
            costs = {n_rows: measure_costs(rehearsal, gammas)}
        else:
            costs = measure_for_decode(rehearsal, gammas, n_steps)
    costs = session.ranks.shared(lambda: costs)
    if session.ranks.leads and not whole:
        store_costs(key, costs)
    return RunCosts(session.prefix_len, costs, time.perf_counter() - started, kept=False)


def _key(session: Session) -> dict[str, Any]:
    draft = session.draft
    assert draft is not None
    return {
        **settings_record(session),
        "seed": None,
        "models": [[asdict(one.config), one.manifest_sha256] for one in (session.target, session.draft_source) if one],
        "ranks": [session.config.n_replicas, session.group, session.draft_group, session.target_ranks.all_reduce.name],
        "drafters": [[level.kind, [[one.name, asdict(one)] for one in level.policies]] for level in draft.levels],
        "gammas": draft.gammas,
        "context": round(LENGTHS_PER_OCTAVE * math.log2(session.prefix_len)),
        **provenance(),
    }
