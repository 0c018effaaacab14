"""How a run decodes and drafts, as records say it."""

from dataclasses import fields
from typing import Any

from bench.config import AUTO
from bench.resolved import ResolvedDraft
from bench.session import Session
from common.say import dtype_name
from engine.drafters.config import ModelDrafterConfig, drafters
from kv_cache.policy import policies

# Fields of drafters that are no options of a record, or have another place there.
ELSEWHERE = {"policy", "policies", "texts", "gamma", "draft_model", "draft_ranks"}


def settings_record(session: Session) -> dict[str, Any]:
    """How a run decodes and drafts, and how both models are stored: the same in every record."""
    params, runner = session.sampling.params, session.runner
    return {
        **_draft_record(session.draft),
        "verification": session.sampling.mode,
        **vars(params),
        "seed": None if params.greedy else params.seed,
        "device": str(runner.device),
        "dtype": dtype_name(session.dtype),
        "attention": runner.model.backend.name,
        "compile": session.config.target.compile,
        "cuda_graphs": runner.graphs is not None,
        "quantize": session.config.target.quantize,
        "kv_dtype": dtype_name(runner.cache.keys.dtype),
        "pointwise": runner.model.pointwise.name,
    }


def _draft_record(draft: ResolvedDraft | None) -> dict[str, Any]:
    """Every option of every drafter and policy, null where it is not this draft's."""
    nothing = {"draft_model": None, "draft_borrows": None, "gamma": 0, "draft_policy": None}
    nothing |= dict.fromkeys(option_names())
    if draft is None:
        return nothing
    config, texts = draft.config, getattr(draft.config, "texts", ())
    own = {name: value for owner in (*texts, config) for name, value in vars(owner).items()}
    own |= _of_policies(draft)
    schedule = AUTO if config.gamma == AUTO else config.gamma_schedule or "constant"
    own |= {"text_drafts": [text.name for text in texts] or None, "gamma_schedule": schedule}
    own |= dict.fromkeys(config.unused)
    own |= {"draft_model": draft.source and draft.source.name, "gamma": AUTO if draft.auto_gamma else draft.gamma}
    if draft.source and draft.source.borrowed:
        own |= {"draft_borrows": list(draft.source.borrowed)}
    if draft.policy and draft.dtype:
        own |= {
            "draft_policy": AUTO if draft.auto_policy else draft.policy.name,
            "draft_budget": AUTO if draft.auto_budget else draft.capacity,
            "draft_positions": own.get("draft_positions", AUTO).replace(AUTO, "absolute"),
            "draft_layers": draft.layers,
            "draft_dtype": dtype_name(draft.dtype),
            "draft_weights": draft.quantize,
            "draft_kv_dtype": dtype_name(draft.kv_dtype or draft.dtype),
        }
    if draft.inner and draft.inner.source:
        own |= {"draft_of_draft": draft.inner.source.name}
    return {name: own.get(name) for name in nothing}


def _of_policies(draft: ResolvedDraft) -> dict[str, Any]:
    """Options of the policies: of one with a value of its own in each, those by the policy's name."""
    each: dict[str, dict[str, Any]] = {}
    for policy in draft.policies:
        for name, value in vars(policy).items():
            each.setdefault(name, {})[policy.name] = value
    return {name: values if len({*values.values()}) > 1 else {*values.values()}.pop() for name, values in each.items()}


def option_names() -> list[str]:
    """The options of all policies and drafters, in the order of records: of drafts without a model before others."""
    by_kind = sorted(drafters().values(), key=lambda kind: issubclass(kind, ModelDrafterConfig))
    kinds: list[Any] = [*policies().values(), *by_kind]
    every = dict.fromkeys(one.name for kind in kinds for one in fields(kind))
    return [*(name for name in every if name not in ELSEWHERE), "text_drafts"]
