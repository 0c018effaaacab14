"""Loads the models of a plan, each with its attention backend and pointwise kernels."""

from typing import Any

import torch

from bench.config import AUTO
from bench.plan import DraftPlan, Plan
from common.say import say
from engine.parallel.ranks import ModelRanks
from models import Transformer
from models.checkpoints.model_source import ModelSource
from models.heads.loading import HeadSource
from models.llama import select_layers
from models.pointwise import compiled, use_pointwise
from models.pointwise_cpp import pointwise_beside

# Models and heads that draft, by `DraftPlan.weights`.
Models = dict[tuple[object, ...], Any]


def load_target(plan: Plan, ranks: ModelRanks) -> Transformer:
    """Return the target, or this rank's shard of it."""
    model = _load(plan, plan.target, ranks, dtype=plan.dtype, quantize=plan.config.target.quantize)
    return _prepared(plan, model, plan.kv_dtype, "attention")


def load_draft(
    plan: Plan, models: Models, target: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> None:
    """Add the models that draft to `models`, but for those that are there and for the target as it is loaded."""
    for draft in plan.draft.levels if plan.draft else ():
        if draft.weights in models or (draft.dtype is None and draft.source is None):
            continue
        model = _draft_model(plan, draft, target, target_ranks, draft_ranks)
        if model is None:
            continue
        models[draft.weights] = model
        if draft.quantize and vars(draft.config).get("draft_weights") == AUTO:
            say(f"the draft's weights: {draft.quantize} (--draft_weights auto)")
        if draft.policy is not None:
            _prepared(plan, getattr(model, "body", model), draft.kv_dtype, "the draft's attention")


def _draft_model(
    plan: Plan, draft: DraftPlan, target: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> Any:
    """Return a model or head that drafts; None if that is the target itself, or if this rank holds no part of it."""
    stored: dict[str, Any] = {"dtype": draft.dtype or plan.dtype, "quantize": draft.quantize}
    if isinstance(draft.source, HeadSource):
        if borrowed := draft.source.borrowed:
            say(f"{draft.source.name} uses the target's {' and '.join(borrowed)}")
        return draft.source.load(device=plan.device, **stored)
    if draft.source is not None:
        return _load(plan, draft.source, draft_ranks, **stored) if draft_ranks and draft_ranks.holds else None
    if not plan.shares_weights:
        return _load(plan, plan.target, target_ranks, **stored, layers=draft.layers)
    return select_layers(target, draft.layers) if draft.layers is not None else None


def _load(plan: Plan, source: ModelSource, ranks: ModelRanks, **stored: Any) -> Transformer:
    exchange = ranks if len(plan.group) > 1 else None
    return source.load(device=plan.device, attention=plan.config.target.attention, exchange=exchange, **stored)


def _prepared(plan: Plan, model: Transformer, entries: torch.dtype | None, name: str) -> Transformer:
    """Give a model the attention backend for its shape and KV entries, and pointwise kernels that suit the backend."""
    config = model.config
    model.backend, why = plan.attention(config, model.dtype, entries)
    say(f"{name}: {model.backend.name} ({why})")
    sizes = (config.dim, config.ffn_dim, config.n_head, config.n_kv_head, config.head_dim)
    compiles = plan.config.target.compile
    use_pointwise(model, compiled(sizes=sizes) if compiles else pointwise_beside(model.backend))
    return model
