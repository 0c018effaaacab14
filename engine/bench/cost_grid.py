"""Costs over batches and contexts, and the acceptance of several drafts, from one loaded model over one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tqdm import tqdm

from common.say import say
from engine.acceptance import AcceptanceRate
from engine.bench.config import RunConfig, Sizes
from engine.bench.cost_flags import ACCEPTANCE_GAMMA, CostFlags, Draft
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
    batches, contexts = flags.sorted("batches"), flags.sorted("contexts")
    policies = {budget: policy for policy, budget in flags.drafts}
    budgets = sorted(policies, reverse=True)
    cells: list[list[list[Costs]]] = []
    with tqdm(total=len(batches) * len(contexts), desc="costs", unit="cell") as bar:
        for batch in batches:
            cells.append([])
            for context in contexts:
                one_each = [(policies[budget], budget) for budget in budgets]
                measured = dict(zip(budgets, _cell(session, flags, batch, context, one_each), strict=True))
                cells[-1].append([measured[budget] for _, budget in flags.drafts])
                bar.update()
    return CostGrid.of(batches, contexts, flags.drafts, cells)


def measure_acceptance(session: Session, flags: CostFlags, context: int) -> dict[Draft, AcceptanceRate]:
    """The acceptance of each draft on the data set's own text behind `context` tokens."""
    assert session.tokenizer is not None
    n_row, n_token = flags.n_acceptance_rows, flags.n_acceptance_tokens
    gamma = min(ACCEPTANCE_GAMMA, max(flags.gammas))
    narrow = session.narrowed(n_row, context + n_token + gamma + 1)
    stretches = make_prompts(session.books(), session.tokenizer, n_prompts=n_row, prefix_len=context + n_token)
    say(f"measuring the acceptance of {len(flags.drafts)} drafts on {n_row} rows of text, {context} tokens each")
    prompts = [stretch[:context] for stretch in stretches]
    continuations = [stretch[context:] for stretch in stretches]
    rates = {}
    for draft, config in flags.configs().items():
        drafter = narrow.drafter(replace(config, gamma=gamma))
        sampling = session.sampling
        counts = forced_acceptance(narrow.runner, drafter, prompts, continuations, sampling.params, sampling.mode)
        summed = total(counts)
        rates[draft] = AcceptanceRate(summed.accepted / summed.verified, summed.verified)
    return rates


def _cell(session: Session, flags: CostFlags, batch: int, context: int, drafts: Sequence[Draft]) -> list[Costs]:
    gammas = flags.sorted("gammas")
    narrow = session.narrowed(batch, context + ROOM + gammas[-1] + 1)
    prompts = [[(row + i) % narrow.runner.vocab_size for i in range(context)] for row in range(batch)]
    fill_with_noise(narrow.runner, prompts)
    configs = flags.configs()
    measured = measure_costs(
        narrow.runner,
        [narrow.drafter(configs[draft]) for draft in drafts],
        prompts,
        gammas=gammas,
        max_new_tokens=ROOM,
        sampling=session.sampling.params,
        verification=session.sampling.mode,
    )
    return [replace(costs, acceptance=None) for costs in measured]  # of random entries, which says nothing
