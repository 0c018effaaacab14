"""The cost model without a machine: costs by the roofline, acceptance given or published, and what follows."""

import itertools
from dataclasses import fields, replace

from common.errors import ConfigError, OutOfMemoryError, flag, without_effect
from common.jsonl import publish, require_appendable
from common.provenance import git_commit
from engine.acceptance import AcceptanceRate
from engine.bench.config import AUTO, Sampling, Target, Text
from engine.bench.cost_flags import CostFlags, Draft
from engine.bench.cost_tables import PARTS, Acceptances, best_of, best_table, cost_record, cost_table, heat_map
from engine.bench.plan import check_layers
from engine.cost_model.costs import CostGrid
from engine.cost_model.machines import Machine, find_machine
from engine.cost_model.published import published_acceptance
from engine.cost_model.roofline import Stored, device_bytes, predict_costs
from engine.drafters.config import DrafterConfig
from engine.drafters.self_speculation import SelfConfig
from models.checkpoints.model_source import find_model
from models.config import ModelConfig

# Of the target, what bytes and operations depend on.
SHAPE = ("model", "model_name", "dtype", "quantize", "kv_dtype")


def report_prediction(flags: CostFlags) -> None:
    """Predict, print and record; nothing is loaded or measured. Errors: UserError."""
    assert flags.machine is not None
    machine = find_machine(flags.machine)
    check_flags(flags)
    require_appendable(flags.output.output)
    source = find_model(flags.target.model, "dummy", flags.target.model_name, flag("model"))
    target, contexts = stored_target(source.config, flags.target), flags.sorted("contexts")
    require_room(target, machine, max(flags.batches), contexts[-1])
    acceptances = acceptances_of(source.name, flags, contexts)
    drafts = {draft: config for draft, config in flags.configs().items() if draft in acceptances[contexts[0]]}
    cells = {
        (batch, context): [
            predict_costs(
                target,
                stored_draft(target, config),
                machine,
                batch=batch,
                context=context,
                budget=config.policy.entries(context),  # type: ignore[attr-defined]
                gammas=flags.sorted("gammas"),
            )
            for config in drafts.values()
        ]
        for batch, context in itertools.product(flags.sorted("batches"), contexts)
    }
    grid = CostGrid.of(list(drafts), cells)
    best = [best_of(grid, batch, context, acceptances) for batch in grid.batches for context in grid.contexts]
    published = "published for these contexts (arXiv 2408.11049); drafts without one are left out"
    said = published if flags.alpha is None else "given"
    record = {
        "benchmark": "cost_prediction",
        "model": source.name,
        "predicted_for": flags.machine,
        "git_commit": git_commit(),
        **{name: getattr(target, name) for name in ("dtype", "weights", "kv")},
        **cost_record(grid, "predicted_", PARTS[:-1]),
        "acceptance_rates_by_context": [[acceptances[s][draft].value for s in contexts] for draft in drafts],
        "acceptance_of": said,
        "best": best,
    }
    title = (
        f"\npredicted for {flags.machine} from its numbers, nothing measured; {source.name}, {target.dtype}; "
        f"acceptance {said}\n\n{cost_table(grid, 'predicted costs')}"
    )
    heat_maps = (heat_map(grid, draft, acceptances) for draft in grid.drafts)
    publish(flags.output.output, record, *(f"{table}\n" for table in (title, *heat_maps, best_table(best))))


def check_flags(flags: CostFlags) -> None:
    """Errors: ConfigError for flags of what is loaded, run or read."""
    useless = [
        one.name for one in fields(Target) if one.name not in SHAPE and getattr(flags.target, one.name) != one.default
    ]
    for group in (Text, Sampling):
        given = getattr(flags, group.__name__.lower())
        useless += [one.name for one in fields(group) if getattr(given, one.name) != one.default]
    useless += [name for name in ("acceptance_rows", "gen_len") if getattr(flags, name) is not None]
    if useless:
        what = "nothing is loaded or measured where costs are predicted"
        raise without_effect(useless, what, seen=f"given, with {flag('machine')}", required="either")


def stored_target(config: ModelConfig, target: Target) -> Stored:
    """bfloat16 unless it is named. Errors: ConfigError for float64."""
    dtype = "bfloat16" if target.dtype == AUTO else target.dtype
    if dtype == "float64":
        required, fix = "float32, bfloat16 or float16", f"use {flag('dtype')} bfloat16"
        raise ConfigError("no machine's rate of float64 is stored", flag("dtype"), dtype, required, fix)
    return Stored(config, dtype, target.quantize, None if target.kv_dtype == "same" else target.kv_dtype)


def stored_draft(target: Stored, draft: DrafterConfig) -> Stored:
    """The target as it drafts for itself: what is not said of the draft is the target's. Errors: ConfigError."""
    assert isinstance(draft, SelfConfig)
    check_layers(draft.layers, target.config.n_layer)
    own = replace(target.config, n_layer=len(draft.layers or range(target.config.n_layer)))
    dtype = target.dtype if draft.draft_dtype in (AUTO, "same") else draft.draft_dtype
    weights = target.weights if draft.draft_weights == "same" else draft.draft_weights
    kv = target.kv if draft.draft_kv_dtype == "same" else draft.draft_kv_dtype
    return Stored(own, dtype, weights, kv)


def require_room(target: Stored, machine: Machine, batch: int, context: int) -> None:
    """Errors: OutOfMemoryError: what does not fit has no cost."""
    needed = device_bytes(target, machine, batch, context)
    if needed > machine.memory:
        seen = f"{needed / 1e9:.0f} GB a device for {batch} rows of {context} tokens"
        fix = f"use fewer {flag('batches')}, shorter {flag('contexts')} or more devices"
        what, required = "weights and KV cache do not fit into the machine", f"<= {machine.memory / 1e9:.0f} GB"
        raise OutOfMemoryError(what, f"{flag('machine')} {machine.name}", seen, required, fix)


def acceptances_of(model: str, flags: CostFlags, contexts: list[int]) -> Acceptances:
    """The given one of every draft; else what was published, of the drafts that it was published for. Errors:
    ConfigError where that is none.
    """
    if flags.alpha is not None:
        return dict.fromkeys(contexts, dict.fromkeys(flags.configs(), AcceptanceRate(flags.alpha)))
    rates: dict[Draft, dict[int, float | None]] = {
        draft: {context: published_acceptance(model, *draft, context) for context in contexts}
        for draft in flags.configs()
    }
    known = {draft: by_context for draft, by_context in rates.items() if None not in by_context.values()}
    if not known:
        seen = f"{model}, {flag('contexts')} {' '.join(map(str, contexts))}"
        required, fix = "an acceptance rate of every context", f"add {flag('alpha')} 0.8"
        raise ConfigError("no acceptance was published of this", flag("alpha"), seen, required, fix)
    return {
        context: {draft: AcceptanceRate(rate) for draft, of in known.items() if (rate := of[context]) is not None}
        for context in contexts
    }
