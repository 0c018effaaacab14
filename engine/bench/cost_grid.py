"""Costs over batches and contexts, and the acceptance of several drafts, from one loaded model over one cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from tqdm import tqdm

from common.say import say
from engine.acceptance import AcceptanceRate
from engine.bench import settings
from engine.bench.data import make_prompts
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.setup import Setup, draft_cache, prepare
from engine.cost_model.costs import CostGrid, Costs
from engine.cost_model.measure import measure_costs
from engine.drafters import Drafter, SelfSpeculation
from engine.evaluation.teacher_forcing import forced_acceptance
from engine.runner import ModelRunner
from engine.stats import total

# New tokens that the caches have room for where costs are measured.
ROOM = 48
# The gamma that acceptance is measured at, if no smaller one is the largest.
ACCEPTANCE_GAMMA = 3

Draft = tuple[str, int]


def prepare_largest(
    args: argparse.Namespace, drafts: Sequence[Draft], batches: Sequence[int], contexts: Sequence[int], gamma: int
) -> Setup:
    """The models, and a cache for the largest batch and context; every draft is checked before anything is loaded.

    Memory is planned for the caches of all budgets at once, which a cell of the grid holds, for what is captured of all
    gammas, and for selecting entries where a policy does.
    """
    resolved = [
        settings.draft_settings(settings.with_flags(args, settings.variant_flags(args, *draft, gamma)))
        for draft in drafts
    ]
    # A policy that selects needs more, and cannot do every model.
    largest = max(resolved, key=lambda draft: (draft.policy == "snapkv", draft.capacity))
    budgets = tuple(sorted({budget for _, budget in drafts}))
    sizes = {"B": max(batches), "prefix_len": max(contexts), "gen_len": max(ROOM, args.gen_len), "gamma": gamma}
    most = replace(largest, budgets=budgets, auto_gamma=True)
    return prepare(settings.with_flags(args, sizes), settings.sampling_settings(args), most)


def measure_grid(
    setup: Setup, batches: Sequence[int], contexts: Sequence[int], drafts: Sequence[Draft], gammas: Sequence[int]
) -> CostGrid:
    """Costs over caches of random entries. A draft step costs what its budget does, whatever the policy keeps."""
    budgets = sorted({budget for _, budget in drafts}, reverse=True)
    policies = {budget: policy for policy, budget in drafts}
    cells: list[list[list[Costs]]] = []
    with tqdm(total=len(batches) * len(contexts), desc="costs", unit="cell") as bar:
        for batch in batches:
            cells.append([])
            for context in contexts:
                one_each = [(policies[budget], budget) for budget in budgets]
                measured = dict(zip(budgets, _cell(setup, batch, context, one_each, gammas), strict=True))
                cells[-1].append([measured[budget] for _, budget in drafts])
                bar.update()
    return CostGrid.of(batches, contexts, drafts, cells)


def measure_acceptance(
    setup: Setup, args: argparse.Namespace, drafts: Sequence[Draft], context: int, n_row: int, gamma: int
) -> dict[Draft, AcceptanceRate]:
    """The acceptance of each draft on `args.gen_len` tokens of the data set's own text behind `context` tokens."""
    assert setup.tokenizer is not None
    n_token = args.gen_len
    runner = _narrowed(setup.runner, n_row, context + n_token + gamma + 1)
    stretches = make_prompts(setup.books(), setup.tokenizer, n_prompts=n_row, prefix_len=context + n_token)
    say(f"measuring the acceptance of {len(drafts)} drafts on {n_row} rows of text, {context} tokens each")
    prompts = [stretch[:context] for stretch in stretches]
    continuations = [stretch[context:] for stretch in stretches]
    rates = {}
    for draft in drafts:
        drafter = _drafter(setup, args, runner, draft, min(ACCEPTANCE_GAMMA, gamma))
        counts = forced_acceptance(runner, drafter, prompts, continuations, setup.sampling.params, setup.sampling.mode)
        summed = total(counts)
        rates[draft] = AcceptanceRate(summed.accepted / summed.verified, summed.verified)
    return rates


def _cell(setup: Setup, batch: int, context: int, drafts: Sequence[Draft], gammas: Sequence[int]) -> list[Costs]:
    narrow = _narrowed(setup.runner, batch, context + ROOM + max(gammas) + 1)
    prompts = [[(row + i) % narrow.vocab_size for i in range(context)] for row in range(batch)]
    fill_with_noise(narrow, prompts)
    measured = measure_costs(
        narrow,
        [_drafter(setup, setup.args, narrow, draft, max(gammas)) for draft in drafts],
        prompts,
        gammas=gammas,
        max_new_tokens=ROOM,
        sampling=setup.sampling.params,
        verification=setup.sampling.mode,
    )
    return [replace(costs, acceptance=None) for costs in measured]  # of random entries, which says nothing


def _narrowed(runner: ModelRunner, n_rows: int, extent: int) -> ModelRunner:
    """The same model over the first rows and slots of the same cache, as if it had no others."""
    cache = runner.cache.view(slice(0, n_rows), extent)
    cache.capacity, cache.notes = cache.positions.shape[1], {}
    return ModelRunner(
        runner.model, cache, ranks=runner.ranks, new_graphs=runner.new_graphs, noise_source=runner.noise_source
    )


def _drafter(setup: Setup, args: argparse.Namespace, runner: ModelRunner, draft: Draft, gamma: int) -> Drafter:
    given = settings.draft_settings(settings.with_flags(args, settings.variant_flags(args, *draft, gamma)))
    model = setup.draft_model or runner.model
    cache = draft_cache(given, model.config, runner.max_batch, runner.device)
    return SelfSpeculation(runner, cache, gamma, model, given.layers)
