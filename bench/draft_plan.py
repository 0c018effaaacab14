"""Resolves a draft for a plan's target: its sizes, the policies of its cache, and how it is stored."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.config import AUTO
from bench.plan_types import DraftPlan, Plan
from common.errors import ConfigError, flag
from engine.drafters import check_gamma, check_most_drafts
from engine.drafters.config import DrafterConfig, ModelDrafterConfig
from engine.drafters.self_speculation import SelfConfig
from kv_cache import Policy
from models import ModelConfig
from models.checkpoints.loading import expected_shapes
from models.checkpoints.model_source import ModelSource
from models.heads.loading import HeadSource
from models.kernels.packed_linear import can_pack
from models.kernels.quantize import check_scheme
from models.storage import DTYPES, KV_DTYPES, auto_draft_weights
from models.tensor_parallel import Shard, shard_config

# The largest gamma that `--gamma auto` chooses.
AUTO_GAMMA = 6


def with_draft(plan: Plan, config: DrafterConfig | None) -> Plan:
    """Return the plan with another draft of the same models. Errors: ConfigError for a draft that they cannot do."""
    plan = replace(plan, config=replace(plan.config, draft=config), draft=None)
    if config is None:
        return plan
    _check_oracle(plan, config)
    draft = _resolve_draft(plan, config)
    if config.inner:
        draft = replace(draft, inner=_resolve_draft(plan, config.inner, outer=draft))
    draft = replace(draft, alternatives=tuple(_resolve_draft(plan, other) for other in config.alternatives))
    _check_saving(draft)
    for each in draft.each() if draft.alternatives else ():
        if each.policy is not None:
            check_gamma(1, each.policy.room)
    return replace(plan, draft=draft)


def most_drafts(config: DrafterConfig) -> int:
    """Return the most draft tokens of a round that the options allow."""
    return AUTO_GAMMA if config.gamma == AUTO else int(config.gamma)


def _resolve_draft(plan: Plan, config: DrafterConfig, outer: DraftPlan | None = None) -> DraftPlan:
    """Return a draft for the plan's target, or for the draft `outer`."""
    config.check()
    gamma, source = most_drafts(config), None
    if (path := vars(config).get("draft_model")) is not None:
        source = plan.draft_source
        if source is None or source.path != path:
            where, required = flag("draft_of_draft" if outer else "draft_model"), source.path if source else "none"
            raise ConfigError("a session has one draft model", where, path, required, "open a session with that draft")
    policies: list[Policy] = []
    storage: dict[str, Any] = {}
    if isinstance(config, ModelDrafterConfig):
        _check_choice(config)
        storage = _storage(plan, config, source)
        for policy in config.policies or (config.policy,):
            policies += policy.alternatives(plan.prefix_len)
        for policy in policies:
            policy.check()
        room = min(policy.room for policy in policies)
        gamma = min(gamma, room - 1) if config.gamma == AUTO else gamma
        check_gamma(gamma, room)
    length = plan.capacity or plan.prefix_len + plan.gen_len + gamma + 1
    if source is not None:
        longest = length + (outer.gamma if outer else 0)
        policies = [policy.for_context(source.config.max_context, longest) for policy in policies]
        target, in_text = plan.config.target, not all(policy.in_cache_positions for policy in policies)
        if in_text and source.config.max_context < longest and (changes := target.changes.rotary):
            source = config.find_source(plan.target, target.load_format, target.verify, changes)
            assert source is not None
        if config.gamma != AUTO:
            check_most_drafts(gamma, source.most_drafts)
        gamma = min(gamma, source.most_drafts)
    policies.sort(key=lambda policy: -policy.entries(length))
    draft = DraftPlan(config, gamma, config.gamma == AUTO, tuple(policies), length, source=source, **storage)
    check_layers(draft.layers, plan.target.config.n_layer)
    _check_window(source or plan.target, policies)
    return draft


def _check_oracle(plan: Plan, config: DrafterConfig) -> None:
    """Raise ConfigError for a draft that needs the tokens of plain decoding in a run that does not repeat them."""
    if config.needs_baseline and (plan.config.passes.no_baseline or not plan.reproducible):
        what, where = "an oracle drafts the tokens of plain decoding", f"{flag('draft')} {config.name}"
        seen = f"rejection verification, or {flag('no_baseline')}"
        required = "greedy or coupled verification, which repeats plain decoding, and plain decoding"
        raise ConfigError(what, where, seen, required, f"use {flag('verification')} coupled, and both passes")


def _check_choice(config: ModelDrafterConfig) -> None:
    """Raise ConfigError if policies or budgets cannot be chosen while decoding."""
    if not config.policies and not config.auto_budget:
        return
    where = flag("draft_policy" if config.policies else "draft_budget")
    if not isinstance(config, SelfConfig):
        what = "a draft with a second model cannot change its cache, which would have to be prefilled again"
        raise ConfigError(what, where, AUTO, "a policy and a number of entries", "name them")


def _check_saving(draft: DraftPlan) -> None:
    """Raise ConfigError if several of the drafters to choose among would save their n-grams."""
    each = [(drafted.config, *getattr(drafted.config, "texts", ())) for drafted in draft.each()]
    files = [file for configs in each for config in configs if (file := getattr(config, "ngram_cache", None))]
    if len(files) > 1:
        what, seen = "each of the drafts to choose among would save its n-grams", f"a file for {len(files)} drafts"
        raise ConfigError(what, flag("ngram_cache"), seen, "a single draft that saves", "leave it out")


def check_layers(layers: Sequence[int] | None, n_layer: int) -> None:
    """Raise ConfigError unless a draft's layers are layers of the model."""
    if layers and max(layers) >= n_layer:
        what, where, last = "the draft's layers are not all layers of the model", flag("draft_layers"), n_layer - 1
        raise ConfigError(what, where, f"layer {max(layers)}", f"0 to {last}", f"name layers up to {last}")


def _check_window(model: ModelSource, policies: Sequence[Policy]) -> None:
    """Raise ConfigError if a policy could select entries that a model's sliding window hides."""
    selecting = [policy.name for policy in policies if policy.selects]
    if model.config.sliding_window is not None and selecting:
        what, where = "a policy selects entries that a sliding window hides", f"{flag('draft_policy')} on {model.name}"
        required, fix = "a model that attends to the whole context", f"use {flag('draft_policy')} streaming"
        raise ConfigError(what, where, selecting[0], required, fix)


def _storage(plan: Plan, config: ModelDrafterConfig, source: ModelSource | None) -> dict[str, Any]:
    """Return a draft's `dtype`, `quantize` and `kv_dtype`. "same" of a self-draft means the target's."""
    target, is_target = plan.config.target, isinstance(config, SelfConfig)
    dtype = DTYPES.get(config.draft_dtype, plan.dtype)
    if config.draft_dtype == AUTO and plan.dtype == torch.float32 and can_pack(plan.device, torch.bfloat16):
        dtype = torch.bfloat16
    quantize: str | None = None if config.draft_weights in (AUTO, "same") else config.draft_weights
    is_auto = config.draft_weights == config.draft_dtype == AUTO and target.quantize is None
    model, group = source or plan.target, plan.draft_group if source else plan.group
    if is_auto and not isinstance(model, HeadSource) and not model.config.n_expert:
        quantize = auto_draft_weights(plan.device, dtype, _linear_shapes(model.config, len(group)), model.published)
    if quantize is None and is_target:
        quantize = target.quantize
    if quantize:
        check_scheme(quantize, plan.device, 0 if isinstance(model, HeadSource) else model.config.n_expert)
    entries = target.kv_dtype if is_target and config.draft_kv_dtype == "same" else config.draft_kv_dtype
    return {"dtype": dtype, "quantize": quantize, "kv_dtype": KV_DTYPES.get(entries, dtype)}


def _linear_shapes(config: ModelConfig, n_ranks: int) -> list[tuple[int, ...]]:
    """Return shapes `(d_out, d_in)` of the linear layers of a block, on every rank."""
    each = [expected_shapes(shard_config(config, Shard(rank, n_ranks))) for rank in range(n_ranks)]
    return [shape for shapes in each for name, shape in shapes.items() if name[:9] == "layers.0." and len(shape) == 2]
