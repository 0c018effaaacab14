"""One loaded model over one filled cache, under other draft and sampling flags."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.bench import settings
from engine.bench.plan import resolve_positions
from engine.bench.setup import Setup, load_draft_model
from models.pointwise import use_pointwise


def under(setup: Setup, **flags: Any) -> Setup:
    """The same model, cache and prompts under other flags; what drafts is loaded anew only in another form."""
    args = settings.with_flags(setup.args, flags)
    held, model = setup.draft, setup.runner.model
    standalone = getattr(args, "draft_model", None) is not None
    draft = settings.standalone_settings(args) if standalone else settings.draft_settings(args)
    draft_model = setup.draft_model
    if standalone:
        assert held is not None and (held.dtype, held.quantize) == (draft.dtype, draft.quantize)
        assert setup.draft_source is not None
        draft = resolve_positions(draft, setup.draft_source.config.max_context, setup.runner.cache.capacity)
    elif held is None or (held.dtype, held.quantize) != (draft.dtype, draft.quantize):
        draft_model = load_draft_model(model, setup.target, setup.target_ranks, draft, args)
        if draft_model is not None:
            use_pointwise(draft_model, model.pointwise)
    return dataclasses.replace(
        setup, args=args, draft=draft, draft_model=draft_model, sampling=settings.sampling_settings(args)
    )
