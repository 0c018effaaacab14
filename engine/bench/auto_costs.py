"""What `auto` chooses by: the costs of this run's rounds, measured before it or kept from an earlier run."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.provenance import provenance
from common.say import say
from engine.bench.progress import BarProgress, progress_bar
from engine.bench.session import Session
from engine.bench.settings import settings_record
from engine.cost_model.costs import Costs
from engine.cost_model.measure import MOST_SHARE, measure_for_decode, still_hold
from engine.cost_model.stored import load_costs, store_costs
from engine.drafters import Drafter
from engine.stats import RoundStats

# Prompts and decodes of about one length share their costs: those that round to the same quarter of a power of two.
LENGTHS_PER_OCTAVE = 4
# A round that takes so many times what costs predict was held up by something else.
HELD_UP = 2.0


@dataclass(frozen=True)
class RunCosts:
    """by_rows: of each drafter, while so many rows decode. seconds: what measuring took, or the check of kept ones."""

    by_rows: Mapping[int, Sequence[Costs]]
    seconds: float
    kept: bool

    @property
    def of_all_rows(self) -> Sequence[Costs]:
        return self.by_rows[max(self.by_rows)]

    def held_up(self, rounds: Sequence[RoundStats]) -> int:
        """How many of the rounds took twice what these costs say, or longer."""
        plain, n_rows = self.of_all_rows[0].plain_ms, max(self.by_rows)

        def predicted(round_: RoundStats) -> float:
            drafter, gamma = round_.choice
            return plain if drafter is None else self.of_all_rows[drafter].round_ms(gamma)

        return sum(one.busy == n_rows and 1e3 * one.seconds > HELD_UP * predicted(one) for one in rounds)


def costs_of(session: Session, drafters: Sequence[Drafter], whole: bool = False) -> RunCosts | None:
    """From the prefilled state, where something is to be chosen: by every rank, and the first one's on all.

    whole: measured now, and however long the decode is, at every gamma.
    """
    draft, plan = session.draft, session.plan
    if not draft or not draft.automatic or draft.gamma < 1 or plan.gen_len < 2:
        return None
    started, ranks = time.perf_counter(), session.ranks
    n_steps = plan.gen_len * math.ceil(len(session.prompts) / plan.n_rows)
    with progress_bar("costs", None) as bar:
        how = {**how_measured(session), "progress": BarProgress(bar)}
        given = session.runner, drafters, session.prompts
        anew = whole or session.config.passes.measure_costs
        known = None if anew else ranks.shared(lambda: load_costs(_key(session, n_steps)))
        if known and (checked := still_hold(known[max(known)], *given, **how)):
            return RunCosts(known | {max(known): checked}, time.perf_counter() - started, kept=True)
        say(f"measuring what rounds cost, in {MOST_SHARE:.0%} of the time of plain decoding if that is enough")
        costs = measure_for_decode(*given, gammas=draft.gammas, n_steps=math.inf if whole else n_steps, **how)
    costs = ranks.shared(lambda: costs)
    if ranks.leads and not whole:
        store_costs(_key(session, n_steps), costs)
    return RunCosts(costs, time.perf_counter() - started, kept=False)


def how_measured(session: Session) -> dict[str, Any]:
    """How the session decodes where rounds are rehearsed, whatever would end a row."""
    sampling = session.sampling
    return {"max_new_tokens": session.plan.gen_len, "sampling": sampling.params, "verification": sampling.mode}


def _key(session: Session, n_steps: int) -> dict[str, Any]:
    plan = session.plan
    lengths = {"prompt tokens": plan.prefix_len, "steps": n_steps}
    return {
        **settings_record(session),
        "models": [[asdict(one.config), one.manifest_sha256] for one in (plan.target, plan.draft_source) if one],
        "ranks": [plan.config.n_replicas, plan.group, plan.draft_group, session.target_ranks.all_reduce.name],
        "rows": plan.n_rows,
        "lengths": {name: round(LENGTHS_PER_OCTAVE * math.log2(n)) for name, n in lengths.items()},
        **provenance(),
    } | {"seed": None}
