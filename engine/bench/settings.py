"""How a run decodes and drafts, as records say it."""

from typing import Any

from common.say import dtype_name
from engine.bench.config import AUTO
from engine.bench.resolved import option_names
from engine.bench.session import Session


def settings_record(session: Session) -> dict[str, Any]:
    """How a run decodes and drafts, and how both models are stored: the same in every record."""
    params, runner = session.sampling.params, session.runner
    return {
        **_draft_record(session),
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


def _draft_record(session: Session) -> dict[str, Any]:
    """Every option of every drafter and policy, null where it is not this draft's."""
    draft = session.draft
    own = draft.options if draft else {}
    if draft and draft.dtype is not None:
        own |= {
            "draft_budget": AUTO if draft.auto_budget else draft.capacity,
            "draft_positions": own.get("draft_positions", AUTO).replace(AUTO, "absolute"),
            "draft_layers": draft.layers,
            "draft_dtype": dtype_name(draft.dtype),
            "draft_weights": draft.quantize,
            "draft_kv_dtype": dtype_name(draft.kv_dtype or draft.dtype),
        }
    if draft and draft.inner and draft.inner.source:
        own |= {"draft_of_draft": draft.inner.source.name}
    return {
        "draft_model": draft.source.name if draft and draft.source else None,
        "gamma": AUTO if draft and draft.auto_gamma else draft.gamma if draft else 0,
        "draft_policy": AUTO if draft and draft.auto_policy else draft.policy.name if draft and draft.policy else None,
        **{name: own.get(name) for name in option_names()},
    }
