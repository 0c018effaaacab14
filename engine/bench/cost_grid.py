"""Costs over batches and contexts, and the acceptance of several drafts, from one loaded model over one cache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from common.say import say
from engine.acceptance import AcceptanceRate
from engine.bench.config import RunConfig, Sizes
from engine.bench.cost_flags import CostFlags, Draft
from engine.bench.data import make_prompts
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.plan import resolve_several
from engine.bench.session import Session
from engine.cost_model.costs import CostGrid, Costs
from engine.cost_model.measure import measure_costs
from engine.evaluation.teacher_forcing import forced_acceptance
from engine.stats import total

# New tokens that the caches have room for where costs are measured.
ROOM = 48


def open_largest(flags: CostFlags) -> Session:
    """The models, and a cache for the largest batch and context; every draft is checked before anything is loaded.

    Memory is planned for the caches of all budgets at once, which a cell of the grid holds, for what is captured of all
    gammas, and for selecting entries where a policy does. Errors: UserError.
    """
    rows = flags.batches if flags.alpha is not None else (*flags.batches, flags.n_acceptance_rows)
    sizes = Sizes(max(rows), max(flags.contexts), max(ROOM, flags.n_acceptance_tokens))
    config = RunConfig(flags.target, flags.text, sizes, sampling=flags.sampling, output=flags.output)
    return Session.of_plan(resolve_several(config, list(flags.configs().values()), one_of_each_budget=True))


def measure_grid(session: Session, flags: CostFlags) -> CostGrid:
    """Costs over caches of random entries. A draft step costs what its budget does, whatever the policy keeps."""
    drafts, gammas, sampling = flags.configs(), flags.sorted("gammas"), session.sampling
    of_budget = {budget: config for (_, budget), config in drafts.items()}
    budgets = sorted(of_budget, reverse=True)

    def measure(batch: int, context: int) -> list[Costs]:
        narrow = session.narrowed(batch, context + ROOM + gammas[-1] + 1)
        prompts = [[(row + i) % narrow.runner.vocab_size for i in range(context)] for row in range(batch)]
        fill_with_noise(narrow.runner, prompts)
        drafters = [narrow.drafter(of_budget[budget]) for budget in budgets]
        how: dict[str, Any] = {"max_new_tokens": ROOM, "sampling": sampling.params, "verification": sampling.mode}
        costs = dict(zip(budgets, measure_costs(narrow.runner, drafters, prompts, gammas=gammas, **how), strict=True))
        return [costs[budget] for _, budget in drafts]

    sizes = list(itertools.product(flags.sorted("batches"), flags.sorted("contexts")))
    return CostGrid.of(list(drafts), {size: measure(*size) for size in tqdm(sizes, desc="costs", unit="cell")})


def measure_acceptance(session: Session, flags: CostFlags, context: int) -> dict[Draft, AcceptanceRate]:
    """The acceptance of each draft on the data set's own text behind `context` tokens."""
    assert session.tokenizer is not None
    n_row, n_token, gamma = flags.n_acceptance_rows, flags.n_acceptance_tokens, flags.acceptance_gamma
    narrow, sampling = session.narrowed(n_row, context + n_token + gamma + 1), session.sampling
    stretches = make_prompts(session.books(), session.tokenizer, n_prompts=n_row, prefix_len=context + n_token)
    say(f"measuring the acceptance of {len(flags.configs())} drafts on {n_row} rows of text, {context} tokens each")
    texts = [stretch[:context] for stretch in stretches], [stretch[context:] for stretch in stretches]
    rates = {}
    for draft, config in flags.configs().items():
        drafter = narrow.drafter(replace(config, gamma=gamma))
        summed = total(forced_acceptance(narrow.runner, drafter, *texts, sampling.params, sampling.mode))
        rates[draft] = AcceptanceRate(summed.accepted / summed.verified, summed.verified)
    return rates
