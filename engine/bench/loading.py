"""The models of a plan, each with its attention and what lies between its matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.say import say
from engine.bench.plan import Plan, shares_target
from engine.drafters.standalone import StandaloneConfig
from engine.parallel.ranks import ModelRanks
from models import Transformer
from models.attention import select_backend
from models.checkpoints.model_source import ModelSource
from models.llama import attention_spec, select_layers
from models.pointwise import compiled, use_pointwise
from models.pointwise_cpp import pointwise_beside


def load(
    plan: Plan,
    source: ModelSource,
    dtype: torch.dtype,
    holders: ModelRanks,
    quantize: str | None,
    layers: Sequence[int] | None = None,
) -> Transformer:
    """The model, or what this rank holds of it."""
    exchange = holders if len(plan.group) > 1 else None
    return source.load(plan.device, dtype, plan.config.target.attention, layers, exchange, quantize)


def load_draft(
    plan: Plan, model: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> Transformer | None:
    """What drafts: a model of its own, the target's weights in another form, or some of its layers.

    None where it is the target itself, where no model drafts, and on a rank that has no part of it.
    """
    draft = plan.draft
    if draft is None or draft.dtype is None:
        return None
    if isinstance(draft.config, StandaloneConfig):
        assert plan.draft_source is not None and draft_ranks is not None
        if not draft_ranks.holds:
            return None
        return load(plan, plan.draft_source, draft.dtype, draft_ranks, draft.quantize)
    if not shares_target(draft, plan.dtype, plan.config.target.quantize):
        return load(plan, plan.target, draft.dtype, target_ranks, draft.quantize, draft.layers)
    return None if draft.layers is None else select_layers(model, draft.layers)


def choose_attention(plan: Plan, model: Transformer, entries: torch.dtype | None, whose: str) -> None:
    """Now that its cache's entries are known, and what it holds of its heads; said with the reason."""
    spec = attention_spec(model.config, model.dtype)
    model.backend, why = select_backend(plan.config.target.attention, plan.device, spec, entries)
    say(f"{whose}: {model.backend.name} ({why})")


def use_functions(model: Transformer, compiles: bool) -> None:
    """What lies between its matrix products and attention: compiled for its sizes, or what goes with the backend."""
    own = model.config
    sizes = (own.dim, own.ffn_dim, own.n_head, own.n_kv_head, own.head_dim)
    use_pointwise(model, compiled(sizes=sizes) if compiles else pointwise_beside(model.backend))
