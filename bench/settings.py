"""Makes the entries of a record for a run's configuration, nested as it was given, and as it was resolved."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from bench.config import AUTO
from bench.plan_types import DraftPlan
from bench.session import Session
from common.checkout import ROOT
from common.say import dtype_name
from engine.drafters.config import drafters
from kv_cache.policy import policies


def nested(config: Any) -> Any:
    """Return a configuration as JSON values, without fields that are not set or have no effect; drafters and policies
    have a `name`, and paths begin at the checkout if they lie in it."""
    if isinstance(config, str):
        return config.removeprefix(f"{ROOT}/")
    if isinstance(config, tuple):
        return [nested(value) for value in config]
    if not is_dataclass(config):
        return config
    named = {"name": config.name} if hasattr(config, "name") else {}
    unused = getattr(config, "unused", ())
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in unused}
    return named | {name: nested(value) for name, value in values.items() if value not in (None, ())}


def options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record's draft and its policy, by name; older records have them beside their results."""
    draft = record.get("config", {}).get("draft", {})
    texts = [text["name"] for text in draft.get("texts", ())]
    others = [other["name"] for other in draft.get("alternatives", ())]
    options = draft | draft.get("policy", {}) | {"text_drafts": texts or None, "auto_drafts": others or None}
    known = {name: options[name] for name in option_names() if options.get(name) is not None}
    return known | {name: record[name] for name in option_names() if name in record}


def option_names() -> list[str]:
    """Return the names of all options of drafters and policies."""
    kinds: list[Any] = [*policies().values(), *drafters().values()]
    not_options = {"policy", "policies", "texts", "alternatives", "gamma", "draft_model", "draft_ranks"}
    names = dict.fromkeys(field.name for kind in kinds for field in fields(kind))
    return [*(name for name in names if name not in not_options), "text_drafts", "auto_drafts"]


def settings_record(session: Session) -> dict[str, Any]:
    """Return how a session decodes and drafts, and how its models are stored, with every `auto` resolved."""
    plan, runner = session.plan, session.runner
    return {
        **_draft_record(plan.draft),
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


def _draft_record(draft: DraftPlan | None) -> dict[str, Any]:
    """Return the settings of a draft, with its storage if it has a cache."""
    if draft is None:
        return {"draft": None, "gamma": 0, "draft_policy": None, "draft_budget": None}
    record: dict[str, Any] = {"draft": draft.config.name, "gamma": AUTO if draft.auto_gamma else draft.gamma}
    record |= {"draft_policy": None, "draft_budget": None}
    if draft.alternatives:
        record["auto_drafts"] = [other.config.name for other in draft.alternatives]
    if draft.source:
        record |= {"draft_model": draft.source.name, "draft_borrows": list(draft.source.borrowed)}
    if draft.policy and draft.dtype:
        record |= {
            "draft_policy": AUTO if draft.auto_policy else draft.policy.name,
            "draft_budget": AUTO if draft.auto_budget else draft.capacity,
            "draft_dtype": dtype_name(draft.dtype),
            "draft_weights": draft.quantize,
            "draft_kv_dtype": dtype_name(draft.kv_dtype),
        }
    return record
