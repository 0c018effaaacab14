"""The models of a plan, each with its attention and what lies between its matrix products."""

from typing import Any

import torch

from bench.config import AUTO
from bench.plan import Plan
from common.say import say
from engine.parallel.ranks import ModelRanks
from models import Transformer
from models.checkpoints.model_source import ModelSource
from models.heads.loading import HeadSource
from models.llama import select_layers
from models.pointwise import compiled, use_pointwise
from models.pointwise_cpp import pointwise_beside

# What drafts, by its form.
Models = dict[tuple[object, ...], Any]


def load_target(plan: Plan, holders: ModelRanks) -> Transformer:
    """The target, or what this rank holds of it."""
    model = _load(plan, plan.target, holders, dtype=plan.dtype, quantize=plan.config.target.quantize)
    return _prepared(plan, model, plan.kv_dtype, "attention")


def load_draft(
    plan: Plan, models: Models, target: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> None:
    """Add what drafts, and what drafts for that, to the `models` by its form, unless it is there, the target itself, no
    model, or not on this rank."""
    for draft in plan.draft.levels if plan.draft else ():
        how = {"dtype": draft.dtype or plan.dtype, "quantize": draft.quantize}
        if (draft.dtype or draft.source) is None or draft.form in models:
            continue
        if isinstance(draft.source, HeadSource):
            models[draft.form] = head = draft.source.load(device=plan.device, **how)
            if borrowed := draft.source.borrowed:
                say(f"{draft.source.name} uses the target's {' and '.join(borrowed)}")
            if draft.policy is not None:
                _prepared(plan, head.body, draft.kv_dtype, "the head's attention")
            continue
        if draft.source is not None:
            model = _load(plan, draft.source, draft_ranks, **how) if draft_ranks and draft_ranks.holds else None
        elif not plan.shares_weights:
            model = _load(plan, plan.target, target_ranks, **how, layers=draft.layers)
        else:
            model = select_layers(target, draft.layers) if draft.layers is not None else None
        if model is not None:
            if draft.quantize and vars(draft.config).get("draft_weights") == AUTO:
                say(f"the draft's weights: {draft.quantize} (--draft_weights auto)")
            models[draft.form] = _prepared(plan, model, draft.kv_dtype, "the draft's attention")


def _load(plan: Plan, source: ModelSource, holders: ModelRanks, **how: Any) -> Transformer:
    exchange = holders if len(plan.group) > 1 else None
    return source.load(device=plan.device, attention=plan.config.target.attention, exchange=exchange, **how)


def _prepared(plan: Plan, model: Transformer, entries: torch.dtype | None, whose: str) -> Transformer:
    """With attention for its own shape and its cache's entries, and with what lies between that and its products:
    compiled for its sizes, or what goes with the backend."""
    own = model.config
    model.backend, why = plan.attention(own, model.dtype, entries)
    say(f"{whose}: {model.backend.name} ({why})")
    sizes = (own.dim, own.ffn_dim, own.n_head, own.n_kv_head, own.head_dim)
    compiles = plan.config.target.compile
    use_pointwise(model, compiled(sizes=sizes) if compiles else pointwise_beside(model.backend))
    return model
