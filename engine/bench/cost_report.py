"""The cost model: costs and acceptance measured from one loaded model over one cache, and the speedups that follow."""

import itertools
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from common.jsonl import publish
from common.say import say
from engine.acceptance import AcceptanceRate
from engine.bench.config import RunConfig, Sizes
from engine.bench.cost_flags import CostFlags, Draft
from engine.bench.cost_tables import Acceptances, acceptance_table, best_of, best_table, cost_table, heat_map
from engine.bench.data import make_prompts
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.plan import resolve_several
from engine.bench.record import record_of
from engine.bench.session import Session
from engine.cost_model.costs import CostGrid, Costs
from engine.cost_model.measure import measure_costs
from engine.evaluation.teacher_forcing import forced_acceptance
from engine.stats import total

# New tokens that the caches have room for where costs are measured.
ROOM = 48
# Sizes and settings that a grid has several of.
SIZES = ("B", "prefix_len", "gen_len")
VARIED = (*SIZES, "gamma", "draft_policy", "draft_budget", "n_sink", "snapkv_window", "draft_positions", "max_ngram")


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
    measured = {
        "load_format": flags.target.load_format,
        "dataset": session.plan.dataset if is_measured else None,
        **grid.record(),
        **acceptance_record(acceptances),
        "acceptance_of": "the data set's own text behind each context" if is_measured else "given",
        "best": best,
    }
    record = record_of("cost_model", session, measured, without=VARIED)
    tables = [f"\n{cost_table(grid)}", *([acceptance_table(acceptances)] if is_measured else ())]
    tables += [*(heat_map(grid, draft, acceptances) for draft in grid.drafts), best_table(best)]
    publish(flags.output.output, record, *(f"{table}\n" for table in tables))


def open_largest(flags: CostFlags) -> Session:
    """The models, and a cache for the largest batch and context, once every draft is checked. Memory is planned for the
    caches of all budgets at once, for rounds of all gammas, and for selecting entries. Errors: UserError.
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


def acceptance_record(acceptances: Acceptances) -> dict[str, object]:
    """For a JSON record: rates and verified positions `[D][S]`, by draft and context; of given rates no counts."""
    rows = list(zip(*(at_context.values() for at_context in acceptances.values()), strict=True))
    verified = [[acceptance.n for acceptance in row] for row in rows]
    return {
        "acceptance_rates_by_context": [[round(acceptance.value, 4) for acceptance in row] for row in rows],
        "acceptance_judged_by_context": None if None in verified[0] else verified,
    }
