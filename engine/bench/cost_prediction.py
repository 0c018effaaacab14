"""The cost model without a machine: costs by the roofline, acceptance given or published, and what follows."""

import itertools
from dataclasses import replace
from typing import Any

from common.errors import ConfigError, OutOfMemoryError, flag, without_effect
from common.jsonl import publish, require_appendable
from common.provenance import git_commit
from engine.acceptance import AcceptanceRate
from engine.bench.config import AUTO, Sampling, Target, Text
from engine.bench.cost_flags import CostFlags, Draft
from engine.bench.cost_tables import Acceptances, best_of, best_table, cost_table, heat_map
from engine.bench.plan import check_layers
from engine.cost_model.costs import CostGrid, Costs
from engine.cost_model.machines import find_machine
from engine.cost_model.published import published_acceptance
from engine.cost_model.roofline import Stored, device_bytes, predict_costs
from models.checkpoints.model_source import find_model
from models.config import ModelConfig

# Of the target, what bytes and operations depend on.
SHAPE = ("model", "model_name", "dtype", "quantize", "kv_dtype")


def report(flags: CostFlags) -> None:
    """Predict, print and record; nothing is loaded or measured. Errors: UserError."""
    machine = find_machine(str(flags.machine))
    check_flags(flags)
    require_appendable(flags.output.output)
    source = find_model(flags.target.model, "dummy", flags.target.model_name, flag("model"))
    target, contexts = stored_target(source.config, flags.target), flags.sorted("contexts")
    if (needed := device_bytes(target, machine, max(flags.batches), contexts[-1])) > machine.memory:
        what, required = "weights and KV cache do not fit into the machine", f"<= {machine.memory / 1e9:.0f} GB"
        seen = f"{needed / 1e9:.0f} GB a device for {max(flags.batches)} rows of {contexts[-1]} tokens"
        fix = f"use fewer {flag('batches')}, shorter {flag('contexts')} or more devices"
        raise OutOfMemoryError(what, f"{flag('machine')} {flags.machine}", seen, required, fix)
    acceptances = acceptances_of(source.name, flags)
    drafts, draft = list(acceptances[contexts[0]]), stored_draft(target, flags)

    def costs(batch: int, context: int) -> list[Costs]:
        gammas = flags.sorted("gammas")
        return [predict_costs(target, draft, machine, batch, context, budget, gammas) for _, budget in drafts]

    sizes = list(itertools.product(flags.sorted("batches"), contexts))
    grid = CostGrid.of(drafts, {size: costs(*size) for size in sizes})
    best = [best_of(grid, *size, acceptances) for size in sizes]
    published = "published for these contexts (arXiv 2408.11049); drafts without one are left out"
    said = published if flags.alpha is None else "given"
    record = {
        "benchmark": "cost_prediction",
        "model": source.name,
        "predicted_for": flags.machine,
        "git_commit": git_commit(),
        **{name: getattr(target, name) for name in ("dtype", "weights", "kv")},
        **grid.record("predicted_", ("plain", "verify", "draft")),
        "acceptance_rates_by_context": [[acceptances[s][one].value for s in contexts] for one in drafts],
        "acceptance_of": said,
        "best": best,
    }
    title = f"\npredicted for {flags.machine} from its numbers, nothing measured; {source.name}, {target.dtype}"
    tables = [f"{title}; acceptance {said}\n\npredicted {cost_table(grid)}"]
    tables += [*(heat_map(grid, one, acceptances) for one in drafts), best_table(best)]
    publish(flags.output.output, record, *(f"{table}\n" for table in tables))


def check_flags(flags: CostFlags) -> None:
    """Errors: ConfigError for flags of what is loaded, run or read."""
    given = vars(flags.target) | vars(flags.text) | vars(flags.sampling)
    given |= {"acceptance_rows": flags.acceptance_rows, "gen_len": flags.gen_len}  # None, if they are not given
    defaults = vars(Target()) | vars(Text()) | vars(Sampling())
    if useless := [name for name in given if name not in SHAPE and given[name] != defaults.get(name)]:
        what = "nothing is loaded or measured where costs are predicted"
        raise without_effect(useless, what, seen=f"given, with {flag('machine')}", required="either")


def stored_target(config: ModelConfig, target: Target) -> Stored:
    """bfloat16 unless it is named. Errors: ConfigError for float64."""
    dtype = "bfloat16" if target.dtype == AUTO else target.dtype
    if dtype == "float64":
        required, fix = "float32, bfloat16 or float16", f"use {flag('dtype')} bfloat16"
        raise ConfigError("no machine's rate of float64 is stored", flag("dtype"), dtype, required, fix)
    return Stored(config, dtype, target.quantize, None if target.kv_dtype == "same" else target.kv_dtype)


def stored_draft(target: Stored, flags: CostFlags) -> Stored:
    """The target as it drafts for itself, at any budget; what is not said of it is as there. Errors: ConfigError."""
    draft: Any = next(iter(flags.configs().values()))
    check_layers(draft.layers, target.config.n_layer)
    config = replace(target.config, n_layer=len(draft.layers or range(target.config.n_layer)))
    said = zip(target[1:], (draft.draft_dtype, draft.draft_weights, draft.draft_kv_dtype), strict=True)
    own: list[Any] = [same if one in (AUTO, "same") else one for same, one in said]
    return Stored(config, *own)


def acceptances_of(model: str, flags: CostFlags) -> Acceptances:
    """The given one of every draft; else what was published, of the drafts that it was published for. Errors:
    ConfigError where that is none.
    """
    contexts = flags.sorted("contexts")
    rates: dict[Draft, list[Any]] = {
        draft: [published_acceptance(model, *draft, one) if flags.alpha is None else flags.alpha for one in contexts]
        for draft in flags.configs()
    }
    known = {draft: found for draft, found in rates.items() if None not in found}
    if not known:
        seen = f"{model}, {flag('contexts')} {' '.join(map(str, contexts))}"
        required, fix = "an acceptance rate of every context", f"add {flag('alpha')} 0.8"
        raise ConfigError("no acceptance was published of this", flag("alpha"), seen, required, fix)
    return {s: {draft: AcceptanceRate(found[i]) for draft, found in known.items()} for i, s in enumerate(contexts)}
