"""Reports of the cost model: measured or predicted costs, acceptance, and the speedups that follow."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

from tqdm import tqdm

from bench.auto.costs import Costs
from bench.auto.measure import Rehearsal, measure_costs
from bench.config import AUTO, RunConfig, Sizes
from bench.data import make_prompts
from bench.dummy_prefill import fill_with_noise
from bench.plan import resolve_several
from bench.record import record_of, rounded
from bench.session import Session
from common.errors import ConfigError, flag
from common.jsonl import publish, require_appendable
from common.provenance import git_commit
from common.say import say
from cost_model.flags import CostFlags, Draft
from cost_model.grid import CostGrid
from cost_model.machines import find_machine
from cost_model.published import published_acceptance
from cost_model.roofline import ModelStorage, predict_costs
from cost_model.tables import Acceptance, Acceptances, best_of_each, best_table, cost_table, heat_map
from engine.counts import acceptance_standard_error, total
from engine.evaluation.teacher_forcing import forced_acceptance
from models.config import ModelConfig

# New tokens that caches have room for while costs are measured.
ROOM = 48
# Acceptance is measured on this many rows and tokens of text, at this gamma or the largest if that is smaller.
ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS, ACCEPTANCE_GAMMA = 4, 96, 3
# Sizes and settings that differ within a grid.
VARIED = {"B", "prefix_len", "gen_len", "gamma", "draft_policy", "draft_budget"}


def report_measured(flags: CostFlags) -> None:
    """Measure costs, and acceptance unless it is given; print and record them with predictions. Errors: UserError."""
    session, is_measured = open_largest(flags), flags.alpha is None
    acceptances = {context: measure_acceptance(session, flags, context) for context in flags.sorted("contexts")}
    grid = measure_grid(session, flags)
    found = {
        "load_format": flags.target.load_format,
        "dataset": session.plan.dataset if is_measured else None,
        **grid.record(),
        **follows(grid, acceptances, "the data set's own text behind each context" if is_measured else "given"),
    }
    record = record_of("cost_model", session, found, without=VARIED)
    publish_tables(flags, record, grid, acceptances, "\n")


def report_predicted(flags: CostFlags) -> None:
    """Predict the costs of another machine, with acceptance given or published; print and record them."""
    machine = find_machine(str(flags.machine))
    require_appendable(flags.output.output)
    source = replace(flags.target, load_format="dummy").source()
    (target, draft), contexts = model_storages(source.config, flags), flags.sorted("contexts")
    acceptances = acceptances_of(source.name, flags)
    drafts = list(acceptances[contexts[0]])
    cost = partial(predict_costs, target, draft, machine, gammas=flags.sorted("gammas"))
    sizes = list(itertools.product(flags.sorted("batches"), contexts))
    for batch, context in sizes:
        needed = target.resident_bytes(machine, batch * (context + max(flags.budgets)))
        if needed > machine.memory:
            each = f"{needed / 1e9:.0f} GB on each of {machine.devices} devices, which have {machine.memory / 1e9:.0f}"
            say(f"note: {batch} rows behind {context} tokens do not fit: weights and KV entries take {each}")
    grid = CostGrid.of(drafts, {size: [cost(*size, budget) for _, budget in drafts] for size in sizes})
    published = "published for these contexts (arXiv 2408.11049); drafts without a published rate are left out"
    said = published if flags.alpha is None else "given"
    record = {
        "benchmark": "cost_prediction",
        "model": source.name,
        "predicted_for": flags.machine,
        "git_commit": git_commit(),
        **{name: getattr(target, name) for name in ("dtype", "weights", "kv")},
        **grid.record("predicted_", ("plain", "verify", "draft")),
        **follows(grid, acceptances, said),
    }
    said += "" if flags.alpha is None else ", alike for all drafts: of budgets, the least then wins"
    title = f"\npredicted for {flags.machine} from its numbers, nothing measured; {source.name}, {target.dtype}"
    publish_tables(flags, record, grid, acceptances, f"{title}; acceptance {said}\n\npredicted ")


def publish_tables(
    flags: CostFlags, record: dict[str, Any], grid: CostGrid, acceptances: Acceptances, head: str
) -> None:
    """Print a head, costs, the predictions of each draft, and the best choices; then publish the record."""
    costs = f"{head}costs; verification and draft step in plain steps\n{cost_table(grid)}"
    tables = costs, *(heat_map(grid, draft, acceptances) for draft in grid.drafts), best_table(record["best"])
    publish(flags.output.output, record, *(f"{table}\n" for table in tables))


def open_largest(flags: CostFlags) -> Session:
    """Open a session for the largest batch and context, with room for a draft of each budget. Errors: UserError."""
    rows, n_new = (ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS) if flags.alpha is None else (1, ROOM)
    sizes = Sizes(max(*flags.batches, rows), max(flags.contexts), n_new)
    config = RunConfig(flags.target, flags.text, sizes, sampling=flags.sampling, output=flags.output)
    return Session.of_plan(resolve_several(config, [*flags.configs().values()], at_once=len(set(flags.budgets))))


def measure_grid(session: Session, flags: CostFlags) -> CostGrid:
    """Measure costs over caches of random entries. A draft step is measured for each budget, whatever the policy."""
    drafts, gammas = flags.configs(), flags.sorted("gammas")
    by_budget = {budget: config for (_, budget), config in drafts.items()}
    budgets = sorted(by_budget, reverse=True)

    def measure(batch: int, context: int) -> list[Costs]:
        narrow = session.narrowed(batch, context + ROOM + gammas[-1] + 1)
        prompts = [[(row + i) % narrow.runner.vocab_size for i in range(context)] for row in range(batch)]
        fill_with_noise(narrow.runner, prompts)
        drafters = [narrow.drafter(by_budget[budget]) for budget in budgets]
        how = narrow.how | {"max_new_tokens": ROOM, "gamma": gammas[-1]}
        rehearsal = Rehearsal(narrow.runner, drafters, prompts, **how)
        costs = dict(zip(budgets, measure_costs(rehearsal, gammas), strict=True))
        return [costs[budget] for _, budget in drafts]

    sizes = list(itertools.product(flags.sorted("batches"), flags.sorted("contexts")))
    return CostGrid.of(list(drafts), {size: measure(*size) for size in tqdm(sizes, desc="costs", unit="cell")})


def measure_acceptance(session: Session, flags: CostFlags, context: int) -> dict[Draft, Acceptance]:
    """Measure the acceptance of each draft on the data set's text behind `context` tokens, unless it is given."""
    if flags.alpha is not None:
        return dict.fromkeys(flags.configs(), Acceptance(flags.alpha))
    assert session.tokenizer is not None
    n_row, n_token, gamma = ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS, min(ACCEPTANCE_GAMMA, max(flags.gammas))
    narrow, plan = session.narrowed(n_row, context + n_token + gamma + 1), session.plan
    stretches = make_prompts(session.books(), session.tokenizer, n_prompts=n_row, prefix_len=context + n_token)
    say(f"measuring the acceptance of {len(flags.configs())} drafts on {n_row} rows of text, {context} tokens each")
    texts = [stretch[:context] for stretch in stretches], [stretch[context:] for stretch in stretches]
    rates = {}
    for draft, config in flags.configs().items():
        drafter = narrow.drafter(replace(config, gamma=gamma))
        rows = forced_acceptance(narrow.runner, drafter, *texts, plan.sampling, plan.verification)
        summed = total(rows)
        rates[draft] = Acceptance(summed.accepted / summed.verified, acceptance_standard_error(rows))
    return rates


def follows(grid: CostGrid, acceptances: Acceptances, origin: str) -> dict[str, Any]:
    """Return a record's acceptance rates `[D][S]`, with their standard errors and origin, and the best choices."""
    rows = [[acceptances[context][draft] for context in grid.contexts] for draft in grid.drafts]
    rates, errors = (rounded([[acceptance[i] for acceptance in row] for row in rows]) for i in (0, 1))
    found = {"acceptance_rates_by_context": rates, "acceptance_standard_errors_by_context": errors}
    return found | {"acceptance_of": origin, "best": best_of_each(grid, acceptances)}


def model_storages(config: ModelConfig, flags: CostFlags) -> tuple[ModelStorage, ModelStorage]:
    """Return the storage of the target (default: bfloat16) and of the self-draft. Errors: ConfigError."""
    target, draft = flags.target, cast(Any, next(iter(flags.configs().values())))
    dtype = "bfloat16" if target.dtype == AUTO else target.dtype
    if dtype == "float64":
        required, fix = "float32, bfloat16 or float16", f"use {flag('dtype')} bfloat16"
        raise ConfigError("no machine's rate of float64 is known", flag("dtype"), dtype, required, fix)
    stored = ModelStorage(config, dtype, target.quantize, None if target.kv_dtype == "same" else target.kv_dtype)
    draft.check_layers(config.n_layer)
    given = zip(stored[1:], (draft.draft_dtype, draft.draft_weights, draft.draft_kv_dtype), strict=True)
    formats: list[Any] = [same if value in (AUTO, "same") else value for same, value in given]
    n_layer = config.n_layer if draft.layers is None else len(draft.layers)
    return stored, ModelStorage(replace(config, n_layer=n_layer), *formats)


def acceptances_of(model: str, flags: CostFlags) -> Acceptances:
    """Return the given acceptance rate for every draft, or the published rates. Errors: ConfigError without any."""
    contexts = flags.sorted("contexts")
    rates: dict[Draft, list[Any]] = {
        draft: [published_acceptance(model, *draft, n) if flags.alpha is None else flags.alpha for n in contexts]
        for draft in flags.configs()
    }
    known = {draft: found for draft, found in rates.items() if None not in found}
    if not known:
        seen = f"{model}, {flag('contexts')} {' '.join(map(str, contexts))}"
        required, fix = "an acceptance rate of every context", f"add {flag('alpha')} 0.8"
        raise ConfigError("no acceptance was published of this", flag("alpha"), seen, required, fix)
    return {s: {draft: Acceptance(found[i]) for draft, found in known.items()} for i, s in enumerate(contexts)}
