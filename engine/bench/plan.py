"""What a run's configuration means, checked before anything is loaded: models, text, ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import ConfigError, flag, require_at_least
from common.jsonl import require_appendable
from common.process import LEADER, world_size
from engine.bench.config import AUTO, DEFAULT_PREFIX_LEN, RunConfig
from engine.bench.devices import KV_DTYPES, resolve_device, resolve_dtype
from engine.bench.resolved import ResolvedDraft, ResolvedSampling, resolve_draft, resolve_positions, resolve_sampling
from engine.bench.text import own_prompts, resolve_dataset
from engine.drafters.config import DrafterConfig
from engine.drafters.standalone import StandaloneConfig
from engine.parallel.ranks import check_draft_ranks, check_rank_group, require_single_process
from models.attention import select_backend
from models.checkpoints.model_source import ModelSource, check_vocabulary, find_model
from models.llama import attention_spec
from models.pointwise import check_compiler
from models.quantize import check_scheme
from models.tensor_parallel import check_count

# Seconds: ranks start further apart than the least, and the most is what their libraries can count to.
RANK_TIMEOUTS = (1, 1_000_000)


@dataclass(frozen=True)
class Plan:
    """What a run's configuration means once it is checked, before anything is loaded. Ranks are in shard order.

    dataset: None where nothing is cut from one. own_prompts: the user's, as token ids. prefix_len: of the longest
    prompt. capacity: KV entries a row of the target's cache.
    """

    config: RunConfig
    sampling: ResolvedSampling
    draft: ResolvedDraft | None
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    draft_source: ModelSource | None
    dataset: str | None
    own_prompts: tuple[tuple[int, ...], ...] | None
    n_rows: int
    n_prompts: int
    prefix_len: int
    capacity: int
    group: tuple[int, ...]
    draft_group: tuple[int, ...]

    @property
    def gen_len(self) -> int:
        return self.config.sizes.gen_len

    @property
    def shares_weights(self) -> bool:
        """Whether the draft runs the target's own weights."""
        return self.draft is not None and shares_target(self.draft, self.dtype, self.config.target.quantize)


def shares_target(draft: ResolvedDraft, dtype: torch.dtype, quantize: str | None) -> bool:
    return draft.dtype == dtype and draft.quantize == quantize


def resolve(config: RunConfig, texts: Sequence[str] | None = None) -> Plan:
    """Check options, files, contexts and ranks. `texts`: prompts in place of what `config` says of them.

    Errors: UserError, the same on every rank.
    """
    target_config, sizes, rows = config.target, config.sizes, config.rows
    sampling = resolve_sampling(config.sampling)
    for field in ("B", "gen_len"):
        require_at_least(field, getattr(sizes, field), 1)
    if sizes.prefix_len is not None:
        require_at_least("prefix_len", sizes.prefix_len, 1)
    _check_files(config)
    _check_oracle(config, sampling)
    device = resolve_device(target_config.device)
    target = find_model(
        target_config.model, target_config.load_format, target_config.model_name, flag("model"), target_config.verify
    )
    dataset = resolve_dataset(config, target)
    own = own_prompts(config, target, texts)
    if own is None:
        n_rows, prefix_len = sizes.B, sizes.prefix_len or DEFAULT_PREFIX_LEN
        n_prompts = n_rows if rows.num_prompts is None else rows.num_prompts
        require_at_least("num_prompts", n_prompts, n_rows)
    else:
        n_prompts, prefix_len = len(own), max(map(len, own))
        n_rows = min(sizes.B, n_prompts)
    draft = resolve_draft(config.draft, target_config, prefix_len, sizes.gen_len) if config.draft else None
    gamma = draft.gamma if draft else 0
    capacity = prefix_len + sizes.gen_len + gamma + 1
    _check_context(target, prefix_len, sizes.gen_len, gamma, is_own=own is not None)
    draft_source = None
    if draft and isinstance(draft.config, StandaloneConfig):
        path, how = draft.config.draft_model, target_config.load_format
        draft_source = find_model(path, how, None, flag("draft_model"), target_config.verify)
    draft = fit_draft(draft, target, draft_source, capacity, device) if draft else None
    if target_config.quantize:
        check_scheme(target_config.quantize, device)
    if target_config.compile:
        check_compiler(device)
    group, draft_group = _rank_groups(config, target, draft_source)
    dtype = resolve_dtype(target_config.dtype, device)
    if target_config.attention != AUTO:  # refused now, where this machine does not have it
        select_backend(target_config.attention, device, attention_spec(target.config, dtype))
    return Plan(
        config=config,
        sampling=sampling,
        draft=draft,
        device=device,
        dtype=dtype,
        kv_dtype=KV_DTYPES.get(target_config.kv_dtype, dtype),
        target=target,
        draft_source=draft_source,
        dataset=None if own is not None else dataset,
        own_prompts=own,
        n_rows=n_rows,
        n_prompts=n_prompts,
        prefix_len=prefix_len,
        capacity=capacity,
        group=group,
        draft_group=draft_group,
    )


def fit_draft(
    draft: ResolvedDraft, target: ModelSource, source: ModelSource | None, length: int, device: str
) -> ResolvedDraft:
    """For rows of up to `length` tokens of those models. Errors: ConfigError for what they cannot do."""
    if source is not None:
        draft = resolve_positions(draft, source.config.max_context, length)
    elif draft.layers is not None:
        _check_layers(draft.layers, target.config.n_layer)
    if draft.policy and draft.policy.n_observed:
        _check_no_sliding_window(source or target, draft.policy.name)
    if draft.quantize:
        check_scheme(draft.quantize, device)
    return draft


def resolve_several(config: RunConfig, drafts: Sequence[DrafterConfig], one_of_each_budget: bool = False) -> Plan:
    """With room for the caches of all those drafts at once, and for rounds of all their gammas.

    one_of_each_budget: of equal budgets one is held at a time. Errors: UserError.
    """
    length = config.sizes.prefix_len or DEFAULT_PREFIX_LEN
    each = [resolve_draft(draft, config.target, length, config.sizes.gen_len) for draft in drafts]
    deepest = max(each, key=lambda draft: (draft.gamma, bool(draft.policy and draft.policy.n_observed)))
    plan = resolve(replace(config, draft=replace(deepest.config, gamma=deepest.gamma)))
    assert plan.draft is not None
    budgets = [capacity for draft in each for capacity in draft.capacities]
    held = tuple(sorted(set(budgets) if one_of_each_budget else budgets))
    several = replace(plan.draft, budgets=held, capacity=held[-1], auto_gamma=len(drafts) > 1)
    return replace(plan, draft=several)


def _check_files(config: RunConfig) -> None:
    output, rows = config.output.output, config.rows.save_rows
    require_appendable(output, "output")
    require_appendable(rows, "save_rows")
    if rows and output and os.path.realpath(rows) == os.path.realpath(output):
        raise ConfigError(
            "rows and records would be mixed",
            where=f"{flag('save_rows')} and {flag('output')}",
            seen=output,
            required="two files",
            fix="name another file for the rows",
        )
    shortest, longest = RANK_TIMEOUTS
    if config.ranks and not shortest <= config.ranks.rank_timeout <= longest:
        raise ConfigError(
            "no rank can be waited for that long",
            where=flag("rank_timeout"),
            seen=config.ranks.rank_timeout,
            required=f"{shortest} to {longest} seconds",
            fix="leave it out",
        )


def _check_oracle(config: RunConfig, sampling: ResolvedSampling) -> None:
    if config.draft is None or not config.draft.needs_baseline:
        return
    if config.passes.no_baseline:
        raise ConfigError(
            "an oracle drafts the baseline's output, and there is none",
            where=f"{flag('draft')} {config.draft.name}",
            seen=flag("no_baseline"),
            required="a baseline pass",
            fix=f"leave out {flag('no_baseline')}",
        )
    if not sampling.reproducible:
        raise ConfigError(
            "an oracle drafts what the same random numbers emitted, which rejection must not know",
            where=f"{flag('draft')} {config.draft.name}",
            seen=f"{flag('verification')} {sampling.mode} at temperature {sampling.params.temperature}",
            required="greedy or coupled verification",
            fix=f"use {flag('verification')} coupled",
        )


def _check_context(target: ModelSource, prefix_len: int, gen_len: int, gamma: int, is_own: bool) -> None:
    needed, context = prefix_len + gen_len + gamma + 1, target.config.max_context
    room = context - gamma - 1
    if needed > context:
        length = flag("prompts" if is_own else "prefix_len")
        raise ConfigError(
            "prompt + new tokens + gamma + 1 exceeds the model's context",
            where=f"{length}, {flag('gen_len')} and {flag('gamma')} on {target.name}",
            seen=f"{prefix_len} + {gen_len} + {gamma} + 1 = {needed} tokens",
            required=f"<= {context}",
            fix=f"shorten the longest prompt to {room - gen_len} tokens"
            if is_own and room > gen_len
            else f"use {flag('prefix_len')} {room - gen_len} or less"
            if room > gen_len
            else f"use a shorter {flag('gen_len')}: there is room for {room} prompt and new tokens together",
        )


def _rank_groups(
    config: RunConfig, target: ModelSource, draft_source: ModelSource | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that hold the target, and those that hold a standalone draft."""
    if config.ranks is None:
        require_single_process()
        return (LEADER,), (LEADER,)
    group = check_rank_group(config.ranks.rank_group, world_size())
    check_count(target.config, len(group), f"{flag('rank_group')} (all ranks that torchrun started, if not given)")
    if draft_source is None:
        return group, group
    assert isinstance(config.draft, StandaloneConfig)
    draft_group = check_draft_ranks(config.draft.draft_ranks, group)
    check_count(draft_source.config, len(draft_group), flag("draft_ranks"))
    return group, draft_group


def remarks(plan: Plan) -> list[str]:
    """What a user should know of the run. Errors: ConfigError if the draft's vocabulary is another."""
    draft, source = plan.draft, plan.draft_source
    said = []
    if draft and draft.policy and draft.policy.holds_all(plan.prefix_len + plan.gen_len):
        said.append(f"a budget of {draft.capacity} entries holds the whole context, so the draft misses nothing")
    if draft and draft.layers is not None:
        said.append(f"the draft runs {len(draft.layers)} of {plan.target.config.n_layer} layers: {draft.layers}")
    if draft and draft.policy and source:
        tail = check_vocabulary(plan.target, source)
        if tail:
            said.append(tail)
        context, longest = source.config.max_context, plan.prefix_len + plan.gen_len + draft.gamma
        in_cache = draft.policy.in_cache_positions
        reach = min(draft.capacity, longest) if in_cache else longest
        if reach > context:
            said.append(f"{source.name} was trained on {context} positions, and is used up to {reach}")
        elif in_cache:
            said.append(f"{source.name} counts positions inside its cache (trained context: {context})")
    return said


def _check_no_sliding_window(source: ModelSource, policy: str) -> None:
    if source.config.sliding_window is not None:
        raise ConfigError(
            f"{policy} selects entries that a sliding window hides",
            where=f"{flag('draft_policy')} on {source.name}",
            seen=f"{policy}, and a model with a sliding window of {source.config.sliding_window} tokens",
            required="a model that attends to the whole context",
            fix=f"use {flag('draft_policy')} streaming",
        )


def _check_layers(layers: Sequence[int], n_layer: int) -> None:
    if max(layers) >= n_layer:
        raise ConfigError(
            "the draft's layers are not all layers of the model",
            where=flag("draft_layers"),
            seen=f"layer {max(layers)}",
            required=f"0 to {n_layer - 1}",
            fix=f"name layers below {n_layer}, such as 0-{n_layer - 1}",
        )
