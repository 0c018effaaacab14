"""Makes the entries of a record for a run's configuration, nested as it was given, and as it was resolved."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from bench.draft_flags import option_names
from bench.plan import Plan
from bench.session import Session
from common.checkout import ROOT
from common.say import dtype_name
from engine.drafters.config import AUTO, DrafterConfig

# Entries of a draft's configuration that records have next to it, or that older records nest.
NO_OPTIONS = ("draft", "gamma", "draft_model", "draft_ranks", "name", "policy", "policies", "texts", "alternatives")


def nested(config: Any) -> Any:
    """Return a configuration as JSON values, without fields that are not set or have no effect; a draft is its options
    by flag, and paths begin at the checkout if they lie in it."""
    if isinstance(config, str):
        return config.removeprefix(f"{ROOT}/")
    if isinstance(config, tuple | list):
        return [nested(value) for value in config]
    if not is_dataclass(config):
        return config
    values = config.options() if isinstance(config, DrafterConfig) else vars(config)
    return {name: nested(value) for name, value in values.items() if value not in (None, (), [])}


def options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record's draft, by flag; older records nest them, or have them next to their results."""
    config = record.get("config", {})
    options = config.get("draft", {})
    named = {"text_drafts": options.get("texts"), "auto_drafts": config.get("auto_drafts", options.get("alternatives"))}
    names = {
        option: [draft.get("draft") or draft["name"] for draft in drafts or ()] for option, drafts in named.items()
    }
    options = options | options.get("policy", {}) | {option: found for option, found in names.items() if found}
    known = {name: value for name, value in options.items() if name not in NO_OPTIONS and value is not None}
    return known | {name: record[name] for name in option_names() if name in record}


def settings_record(session: Session) -> dict[str, Any]:
    """Return how a session decodes and drafts, and how its models are stored, with every `auto` resolved."""
    plan, runner = session.plan, session.runner
    return {
        **draft_settings(plan),
        "verification": plan.verification,
        **asdict(plan.sampling),
        "seed": None if plan.sampling.greedy else plan.sampling.seed,
        "device": str(runner.device),
        "dtype": dtype_name(plan.dtype),
        "attention": runner.model.backend.name,
        "compile": plan.config.target.compile,
        "cuda_graphs": runner.graphs is not None,
        "quantize": plan.config.target.quantize,
        "kv_dtype": dtype_name(runner.cache.keys.dtype),
        "pointwise": runner.model.pointwise.name,
    }


def reads_text(record: Mapping[str, Any]) -> str | None:
    """Return what a draft step reads, such as `int4 weights (31%), 512 entries (7%)`: the shares are of the bytes of
    the target's weights, and of the entries of a row at its end. None for a draft without a cache."""
    if record.get("draft_weights_share") is None:
        return None
    weights, entries = (f"{record[f'draft_{part}_share']:.0%}" for part in ("weights", "entries"))
    form, budget = record["draft_weights"] or record["draft_dtype"], record["draft_budget"]
    return f"{form} weights ({weights}), {budget} entries ({'at most ' * (budget == AUTO)}{entries})"


def draft_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan's drafts: those of the first, with `auto` for what is chosen before every round."""
    if not plan.candidates:
        return {"draft": None, "gamma": 0, "draft_policy": None, "draft_budget": None}
    first = plan.candidates[0]
    settings = first.record() | first.reads(plan.planned_target) | dict.fromkeys(plan.automatic, AUTO)
    others = dict.fromkeys(draft.kind for draft in plan.config.drafts if draft.kind != settings["draft"])
    return settings | ({"auto_drafts": [*others]} if others else {})
