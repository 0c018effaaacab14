"""Turns a run's configuration into its plan: checks everything and replaces every `auto`, before anything is loaded."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from bench.config import AUTO, DEFAULT_PREFIX_LEN, RunConfig, Sampling
from bench.data import resolve_dataset
from bench.draft_plan import with_draft
from bench.plan_types import Plan, PromptText
from bench.prompt_sets import load_prompts
from common.errors import ConfigError, flag, require_at_least
from common.process import LEADER, world_size
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig
from engine.drafters.standalone import StandaloneConfig
from engine.modes import resolve_mode
from engine.parallel.ranks import check_draft_ranks, check_rank_group, check_replicas, require_single_process
from engine.sampling.distribution import SamplingParams
from kv_cache import Policy
from models.checkpoints.model_source import ModelSource, check_vocabulary
from models.kernels.quantize import check_scheme
from models.storage import DTYPES, KV_DTYPES, auto_dtype, resolve_device
from models.tensor_parallel import check_count

# The assumed length of a prompt while requests are not known; at most a quarter of a row.
TYPICAL_PROMPT = 2048


def resolve(config: RunConfig, texts: Sequence[PromptText] | None = None, *, max_length: int | None = None) -> Plan:
    """Return the plan of a run: check options, files, contexts and ranks, and replace every `auto`.

    Args:
        texts: prompts, or their token ids, in place of the configuration's.
        max_length: the most tokens of a row, for a session without prompts whose requests come later.

    Errors: UserError, the same on every rank.
    """
    config.check()
    stored, sizes = config.target, config.sizes
    device, target = resolve_device(stored.device), stored.source()
    dtype = DTYPES.get(stored.dtype) or auto_dtype(device, target)[0]
    kv_dtype = KV_DTYPES.get(stored.kv_dtype, dtype)
    if stored.quantize:
        check_scheme(stored.quantize, device, target.config.n_expert)
    params, verification = resolve_sampling(config.sampling)
    draft_source = config.draft.find_source(target, stored.load_format, stored.verify) if config.draft else None
    groups = _rank_groups(config, target, draft_source)
    config = _without_unused(config, device, target.has_text, texts is not None or max_length is not None)
    prompts = _given_prompts(config.rows.prompts, target, texts) if max_length is None else []
    dataset = resolve_dataset(config.text.dataset, target) if prompts is None else None
    n_rows, n_replicas, capacity = sizes.B, config.n_replicas, 0
    if max_length is not None:
        capacity = min(max_length, target.config.max_context)
        n_prompts, prefix_len = 0, min(TYPICAL_PROMPT, capacity // 4)
    elif prompts is not None:
        n_prompts, prefix_len = len(prompts), max(map(len, prompts))
        n_rows = min(n_rows, math.ceil(n_prompts / n_replicas))
        require_at_least("prompts", n_prompts, n_replicas)
    else:
        n_prompts = n_replicas * n_rows if config.rows.num_prompts is None else config.rows.num_prompts
        prefix_len = sizes.prefix_len or DEFAULT_PREFIX_LEN
        require_at_least("num_prompts", n_prompts, n_replicas * n_rows)
    models = device, dtype, kv_dtype, target, draft_source
    numbers = n_rows, n_prompts, prefix_len, capacity
    plan = Plan(config, params, verification, *models, None, dataset, prompts, *numbers, *groups)
    if stored.attention != AUTO:  # refused before loading, where this machine does not have it
        plan.attention(target.config, dtype)
    plan = with_draft(plan, config.draft)
    if max_length is not None:
        require_at_least("max_length", capacity, plan.gamma + 4)
        gen_len = capacity - prefix_len - plan.gamma - 1
        return replace(plan, config=replace(plan.config, sizes=replace(sizes, gen_len=gen_len)))
    if config.passes.measure_costs and not plan.chooses:
        note_without_effect(["measure_costs"], "nothing is auto, so nothing is chosen by them")
    return replace(plan, capacity=_length_in_context(plan))


def resolve_several(
    config: RunConfig,
    drafts: Sequence[DrafterConfig],
    texts: Sequence[PromptText] | None = None,
    at_once: int | None = None,
) -> Plan:
    """Return a plan for several drafts of the same models, with room for rounds of all gammas and for their caches.

    at_once: the most caches that are in memory together; None: all. Errors: UserError.
    """
    plan = resolve(replace(config, draft=max(drafts, key=lambda draft: draft.has_model)), texts)
    assert plan.draft is not None
    gamma = max(with_draft(plan, draft).gamma for draft in drafts)
    plan = replace(plan, draft=replace(plan.draft, gamma=gamma, alternatives=()))
    plan = replace(plan, capacity=_length_in_context(plan))
    caches: list[tuple[int, Policy]] = []
    for planned in (each for draft in drafts if (found := with_draft(plan, draft).draft) for each in found.each()):
        sizes = plan.target.config, 1, plan.capacity, "meta", planned.kv_dtype or plan.dtype
        caches += [(policy.new_cache(*sizes).n_bytes, policy) for policy in planned.policies]
    caches.sort(key=itemgetter(0), reverse=True)
    assert plan.draft is not None
    return replace(plan, draft=replace(plan.draft, policies=tuple(policy for _, policy in caches[:at_once])))


def resolve_sampling(sampling: Sampling) -> tuple[SamplingParams, str]:
    """Return how tokens are drawn, and the verification mode. Errors: ConfigError for a mode that cannot verify it."""
    edits: dict[str, Any] = {name: getattr(sampling, name) for name in ("repetition_penalty", "min_tokens")}
    filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0, sampling.min_p
    params = SamplingParams(*filters, **edits)
    if params.greedy:
        given = {"top_k": params.top_k > 0, "top_p": params.top_p < 1, "min_p": params.min_p > 0}
        given["seed"] = sampling.seed is not None
        if unused := [name for name, is_given in given.items() if is_given]:
            note_without_effect(unused, "temperature 0 is greedy")
        params = SamplingParams(**edits)
    return params, resolve_mode(sampling.mode, [params])


def _without_unused(config: RunConfig, device: str, has_text: bool, has_prompts: bool) -> RunConfig:
    """Return the configuration without options that have no effect here, which notes name."""
    target, rows = config.target, config.rows
    if target.compile and device == "cpu":
        note_without_effect(["compile"], "a CPU runs the project's kernels in C++, which are faster")
        target = replace(target, compile=False)
    read = {"draft_text": config.draft.every if config.draft else (), "prompts": [rows], "stop_at_eos": [rows]}
    unused = [name for name, options in read.items() if any(getattr(each, name, None) for each in options)]
    if unused and not has_text:
        note_without_effect(unused, "random weights have no text")
        rows = replace(rows, prompts=None, stop_at_eos=False)
    if config.sampling.min_tokens and not (rows.stop_at_eos or has_prompts):
        note_without_effect(["min_tokens"], f"rows have a fixed length without {flag('stop_at_eos')}")
    given = {"prefix_len": config.sizes.prefix_len, "num_prompts": rows.num_prompts}
    if (has_prompts or rows.prompts) and (unused := [name for name, value in given.items() if value]):
        note_without_effect(unused, "prompts are taken whole, and all of them")
    return replace(config, target=target, rows=rows)


def _given_prompts(name: str | None, target: ModelSource, texts: Sequence[PromptText] | None) -> list[list[int]] | None:
    """Return the user's prompts as token ids: `texts`, or the first turns of the prompts that `name` stands for (see
    `load_prompts`); None without both. Errors: UserError."""
    if texts is None and name is None:
        return None
    if texts is not None and (isinstance(texts, str) or not texts or not all(texts) or not target.has_text):
        what, required = "these prompts cannot be continued", "texts, none of them empty, and a trained model"
        raise ConfigError(what, "Session.open: prompts", repr(texts)[:80], required, "give [text, text, ...]")
    tokenizer = target.tokenizer()
    texts = [prompt.turns[0] for prompt in load_prompts(str(name))] if texts is None else texts
    prompts = [tokenizer.encode(text, add_bos=True) if isinstance(text, str) else list(text) for text in texts]
    target.check_tokens(prompts)
    return prompts


def _length_in_context(plan: Plan) -> int:
    """Return the tokens of the longest row, with the drafts of its last round. Errors: ConfigError for too many."""
    length, context = plan.prefix_len + plan.gen_len + plan.gamma + 1, plan.target.config.max_context
    if length <= context:
        return length
    what = "prompt + new tokens + gamma + 1 exceeds the model's context"
    where = f"{flag('prefix_len' if plan.prompts is None else 'prompts')}, {flag('gen_len')} and {flag('gamma')}"
    seen = f"{plan.prefix_len} + {plan.gen_len} + {plan.gamma} + 1 = {length} tokens"
    raise ConfigError(
        what, where, seen, f"<= {context}", f"use shorter prompts, fewer new tokens, or {flag('rope_scaling')} yarn:4"
    )


def _rank_groups(
    config: RunConfig, target: ModelSource, draft_source: ModelSource | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a replica that hold the target, and those that hold a standalone draft."""
    n_ranks = check_replicas(config.n_replicas, world_size())
    if config.ranks is None:
        require_single_process()
        return (LEADER,), (LEADER,)
    group = check_rank_group(config.ranks.rank_group, n_ranks)
    check_count(target.config, len(group), f"{flag('rank_group')} (all ranks, if not given)")
    inner = config.draft.inner if config.draft else None
    drafting = inner or config.draft
    if draft_source is None or not isinstance(drafting, StandaloneConfig):  # a head is whole wherever the target is
        return group, group
    draft_group = check_draft_ranks(drafting.draft_ranks, group)
    check_count(draft_source.config, len(draft_group), flag("draft_of_draft" if inner else "draft_ranks"))
    return group, draft_group


def remarks(plan: Plan) -> list[str]:
    """Return sentences about a run that a user should read. Errors: ConfigError for a draft of another vocabulary."""
    draft, said, longest = plan.draft, list[str](), plan.prefix_len + plan.gen_len
    if draft and draft.policy and draft.policy.holds_all(longest):
        said.append(f"the draft's cache keeps the whole context ({draft.capacity} entries), as the target's does")
    for level in draft.levels if draft else ():
        if level.policy is None or level.source is None:
            continue
        if remark := check_vocabulary(plan.target, level.source):
            said.append(remark)
        if level.source.is_changed:
            said.append(f"{level.source.name} has the target's changes of rotary settings, beyond its trained context")
        context, end = level.source.config.max_context, longest + plan.gamma
        reach = min(level.capacity, end) if level.policy.in_cache_positions else end
        if reach > context:
            said.append(f"{level.source.name} was trained on {context} positions, and is used up to {reach}")
    return said
