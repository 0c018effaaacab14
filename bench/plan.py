"""What a run's configuration means, checked before anything is loaded: models, text, ranks."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from bench.config import AUTO, DEFAULT_PREFIX_LEN, RunConfig
from bench.resolved import (
    DTYPES,
    KV_DTYPES,
    ResolvedDraft,
    ResolvedSampling,
    auto_dtype,
    resolve_device,
    resolve_draft,
    resolve_sampling,
    store_draft,
)
from bench.text import PromptText, own_prompts, resolve_dataset
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import require_appendable
from common.process import LEADER, world_size
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig
from engine.drafters.medusa import check_heads
from engine.drafters.standalone import StandaloneConfig
from engine.parallel.ranks import check_draft_ranks, check_rank_group, check_replicas, require_single_process
from kv_cache import Policy
from models import ModelConfig
from models.attention import Selection, select_backend
from models.checkpoints.loading import expected_shapes
from models.checkpoints.model_source import ModelSource, check_vocabulary
from models.heads.loading import HeadSource
from models.llama import attention_spec
from models.quantize import check_scheme
from models.tensor_parallel import Shard, check_count, shard_config


@dataclass(frozen=True)
class Plan:
    """What a run's configuration means once it is checked, before anything is loaded. own_prompts: the user's, as token
    ids; else they are cut from the dataset, if there is one. n_rows: of a replica. prefix_len: of the longest prompt.
    capacity: KV entries a row of the target's cache. group, draft_group: in each replica, in shard order."""

    config: RunConfig
    sampling: ResolvedSampling
    draft: ResolvedDraft | None
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    draft_source: ModelSource | None
    dataset: str | None
    own_prompts: list[list[int]] | None
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
    def gamma(self) -> int:
        """The most that a round drafts."""
        return self.draft.gamma if self.draft else 0

    @property
    def chooses(self) -> bool:
        """Whether there is anything to choose from round to round."""
        return self.draft is not None and self.draft.automatic and self.gamma > 0 and self.gen_len > 1

    @property
    def length(self) -> int:
        """Tokens of the longest row, with what its last round drafts."""
        return self.prefix_len + self.gen_len + self.gamma + 1

    @property
    def shares_weights(self) -> bool:
        """Whether the draft runs the target's own weights."""
        own = None, self.dtype, self.config.target.quantize
        return self.draft is not None and (self.draft.source, self.draft.dtype, self.draft.quantize) == own

    def attention(self, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None = None) -> Selection:
        """The backend for a model, or a shard, of that shape over such entries, and why it is that one."""
        return select_backend(self.config.target.attention, self.device, attention_spec(config, dtype), entries)


Planned = TypeVar("Planned", bound=Plan)


def resolve(config: RunConfig, texts: Sequence[PromptText] | None = None) -> Plan:
    """Check options, files, contexts and ranks. `texts`: prompts in place of the configuration's, or their ids. Errors:
    UserError, the same on every rank."""
    stored, sizes = config.target, config.sizes
    sampling = resolve_sampling(config.sampling)
    for field, size in vars(sizes).items():
        if size is not None:
            require_at_least(field, size, 1)
    _check_files(config)
    _check_oracle(config, sampling)
    n_replicas = config.n_replicas
    n_ranks = check_replicas(n_replicas, world_size())
    device, target = resolve_device(stored.device), stored.source()
    dtype = DTYPES.get(stored.dtype) or auto_dtype(device, target)[0]
    kv_dtype = KV_DTYPES.get(stored.kv_dtype, dtype)
    dataset, own = resolve_dataset(config, target), own_prompts(config, target, texts)
    if own is None:
        n_rows, prefix_len = sizes.B, sizes.prefix_len or DEFAULT_PREFIX_LEN
        n_prompts = n_replicas * n_rows if config.rows.num_prompts is None else config.rows.num_prompts
        require_at_least("num_prompts", n_prompts, n_replicas * n_rows)
    else:
        dataset, n_prompts, prefix_len = None, len(own), max(map(len, own))
        n_rows = min(sizes.B, math.ceil(n_prompts / n_replicas))
        if n_prompts < n_replicas:
            where, seen = f"{flag('prompts')}, {flag('data_parallel')}", f"{n_prompts} prompts, {n_replicas} replicas"
            required, fix = "a prompt for every replica", f"use {flag('data_parallel')} {n_prompts} or less"
            raise ConfigError("there are fewer prompts than replicas", where, seen, required, fix)
    source = config.draft.find_source(target, stored.load_format, stored.verify) if config.draft else None
    if stored.quantize:
        check_scheme(stored.quantize, device)
    if stored.compile and device == "cpu":
        note_without_effect(["compile"], "a CPU runs the project's kernels in C++, which are faster")
        config = replace(config, target=replace(stored, compile=False))
    groups = _rank_groups(config, target, source, n_ranks)
    lengths = n_rows, n_prompts, prefix_len
    # Without a draft, which gamma and so the capacity depend on.
    plan = Plan(config, sampling, None, device, dtype, kv_dtype, target, source, dataset, own, *lengths, 0, *groups)
    if stored.attention != AUTO:  # refused now, where this machine does not have it
        plan.attention(target.config, dtype)
    plan = with_draft(plan, config.draft)
    if config.passes.measure_costs and not plan.chooses:
        note_without_effect(["measure_costs"], "nothing is auto, so nothing is chosen by them")
    _check_context(plan)
    return replace(plan, capacity=plan.length)


def check_layers(layers: Sequence[int] | None, n_layer: int) -> None:
    """Errors: ConfigError unless a draft's layers are the model's."""
    if layers and max(layers) >= n_layer:
        what, seen = "the draft's layers are not all layers of the model", f"layer {max(layers)}"
        fix = f"name layers below {n_layer}, such as 0-{n_layer - 1}"
        raise ConfigError(what, flag("draft_layers"), seen, f"0 to {n_layer - 1}", fix)


def with_draft(plan: Planned, config: DrafterConfig | None) -> Planned:
    """The same models under another draft. Errors: ConfigError for what they cannot do, and for another draft model."""
    plan = replace(plan, config=replace(plan.config, draft=config), draft=None)
    if config is None:
        return plan
    draft = _resolved_draft(plan, config)
    if config.inner:
        draft = replace(draft, inner=_resolved_draft(replace(plan, draft=draft), config.inner))
    return replace(plan, draft=draft)


def _resolved_draft(plan: Plan, config: DrafterConfig) -> ResolvedDraft:
    """One that drafts for the target, or for what the plan drafts with."""
    draft = resolve_draft(config, plan.prefix_len, plan.gen_len)
    source, n_layer, drafting = plan.draft_source, plan.target.config.n_layer, plan.target
    if (named := vars(config).get("draft_model")) is not None:
        if source is None or source.path != named:
            held = source.path if source else "no draft model: the session was opened without"
            what, fix = "a session holds one draft model", "open a session with that draft"
            where = flag("draft_of_draft" if plan.draft else "draft_model")
            raise ConfigError(what, where, named, held, fix)
        drafting, length = source, max(plan.capacity, plan.length + draft.gamma)
        if draft.policy is not None:
            draft = replace(draft, policies=(draft.policy.for_context(source.config.max_context, length),))
        if not draft.auto_gamma:
            check_heads(draft.gamma, source.most_drafts)
        draft = replace(draft, source=source, gamma=min(draft.gamma, source.most_drafts))
    check_layers(draft.layers, n_layer)
    window, selecting = drafting.config.sliding_window, [one.name for one in draft.policies if one.selects]
    if selecting and window is not None:
        what, where = f"{selecting[0]} selects entries that a sliding window hides", flag("draft_policy")
        seen = f"{selecting[0]}, and a model with a sliding window of {window} tokens"
        required, fix = "a model that attends to the whole context", f"use {where} streaming"
        raise ConfigError(what, f"{where} on {drafting.name}", seen, required, fix)
    group = plan.draft_group if draft.source else plan.group
    linears, published = list[tuple[int, ...]](), list[str]()
    if not isinstance(draft.source, HeadSource):
        linears, published = _linear_shapes(drafting.config, len(group)), drafting.published
    draft = store_draft(draft, plan.config.target, plan.device, plan.dtype, linears, published)
    if draft.quantize:
        check_scheme(draft.quantize, plan.device)
    return draft


def _linear_shapes(config: ModelConfig, n_ranks: int) -> list[tuple[int, ...]]:
    """Shapes `(d_out, d_in)` of the linear layers of a block, as so many ranks hold them."""
    each = [expected_shapes(shard_config(config, Shard(rank, n_ranks))) for rank in range(n_ranks)]
    return [shape for shapes in each for name, shape in shapes.items() if name[:9] == "layers.0." and len(shape) == 2]


def resolve_several(
    config: RunConfig,
    drafts: Sequence[DrafterConfig],
    at_once: Literal["all", "one of each budget", "one"] = "all",
    texts: Sequence[PromptText] | None = None,
) -> Plan:
    """Room for the caches of so many of those drafts at once, and for rounds of all gammas. Errors: UserError."""
    length = config.sizes.prefix_len or DEFAULT_PREFIX_LEN
    each = [resolve_draft(draft, length, config.sizes.gen_len) for draft in drafts]
    deepest = max(each, key=lambda draft: (draft.gamma, bool(draft.policy and draft.policy.selects)))
    plan = resolve(replace(config, draft=replace(deepest.config, gamma=deepest.gamma)), texts)
    assert plan.draft is not None
    each = [resolve_draft(draft, plan.prefix_len, plan.gen_len) for draft in drafts]
    pairs = [pair for draft in each for pair in zip(draft.capacities, draft.policies, strict=True)]

    def demands(policy: Policy) -> tuple[int, ...]:
        """Sort caches of as many entries by the memory that they take."""
        cache = policy.new_cache(plan.target.config, 1, plan.capacity, "meta", plan.dtype)
        return policy.of_self_drafts, cache.n_bytes, cache.selects, cache.n_queries

    pairs.sort(key=lambda pair: (pair[0], *demands(pair[1])))
    held = pairs if at_once == "all" else [*dict(pairs).items()]
    if at_once == "one":
        held = [pair for pair in pairs if pair[1].has_own_storage]
        if others := [pair for pair in pairs if not pair[1].has_own_storage]:
            largest = others[-1][0]
            held.append((largest, max((policy.with_entries(largest) for _, policy in others), key=demands)))
    capacities, policies = zip(*reversed(held), strict=True) if held else ((), ())
    is_chosen = plan.draft.auto_gamma if at_once == "one" else len(drafts) > 1
    return replace(plan, draft=replace(plan.draft, policies=policies, capacities=capacities, auto_gamma=is_chosen))


def _check_files(config: RunConfig) -> None:
    require_appendable(config.output.output, "output")
    require_appendable(config.rows.save_rows, "save_rows")
    output, rows = config.output.output, config.rows.save_rows
    if rows and output and os.path.realpath(rows) == os.path.realpath(output):
        where, fix = f"{flag('save_rows')} and {flag('output')}", "name another file for the rows"
        raise ConfigError("rows and records would be mixed", where, output, "two files", fix)
    # At most what the libraries of the ranks can count to.
    if config.ranks and not 1 <= (seconds := config.ranks.rank_timeout) <= 1_000_000:
        what, required = "no rank can be waited for that long", "1 to 1000000 seconds"
        raise ConfigError(what, flag("rank_timeout"), seconds, required, "leave it out")


def _check_oracle(config: RunConfig, sampling: ResolvedSampling) -> None:
    if config.draft and config.draft.needs_baseline and (config.passes.no_baseline or not sampling.reproducible):
        what, where = "an oracle drafts what plain decoding emitted", f"{flag('draft')} {config.draft.name}"
        seen = f"{sampling.mode} verification" + f", {flag('no_baseline')}" * config.passes.no_baseline
        required = f"greedy or coupled verification, which repeats plain decoding, and no {flag('no_baseline')}"
        fix = f"leave out {flag('no_baseline')}" if sampling.reproducible else f"use {flag('verification')} coupled"
        raise ConfigError(what, where, seen, required, fix)


def _check_context(plan: Plan) -> None:
    context = plan.target.config.max_context
    if plan.length <= context:
        return
    room = context - plan.gamma - 1
    fix = f"shorten prompts or {flag('gen_len')}: there is room for {room} prompt and new tokens together"
    what = "prompt + new tokens + gamma + 1 exceeds the model's context"
    prompts = "prefix_len" if plan.own_prompts is None else "prompts"
    where = f"{flag(prompts)}, {flag('gen_len')} and {flag('gamma')} on {plan.target.name}"
    seen = f"{plan.prefix_len} + {plan.gen_len} + {plan.gamma} + 1 = {plan.length} tokens"
    raise ConfigError(what, where, seen, f"<= {context}", fix)


def _rank_groups(
    config: RunConfig, target: ModelSource, draft_source: ModelSource | None, n_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the ranks of a replica, those that hold the target, and those that hold a standalone draft."""
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
    """What a user should know of the run. Errors: ConfigError if the draft's vocabulary is another."""
    draft, said = plan.draft, []
    if draft and draft.policy and draft.policy.holds_all(plan.prefix_len + plan.gen_len):
        said.append(
            f"the draft's cache keeps the whole context ({draft.capacity} entries): it reads all that the target reads"
        )
    if draft and not draft.auto_gamma and draft.gamma >= plan.gen_len > 1:  # the first token comes from the prompt
        said.append(f"a round drafts up to {draft.gamma} tokens, of which a row takes at most {plan.gen_len - 1}")
    for one in draft.levels if draft else ():
        if one.policy is None or one.source is None:
            continue
        if tail := check_vocabulary(plan.target, one.source):
            said.append(tail)
        context, longest = one.source.config.max_context, plan.prefix_len + plan.gen_len + plan.gamma
        reach = min(one.capacity, longest) if one.policy.in_cache_positions else longest
        if reach > context:
            said.append(f"{one.source.name} was trained on {context} positions, and is used up to {reach}")
    return said
