"""A run's plan: its configuration with every `auto` resolved and everything checked, before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.config import AUTO, DEFAULT_PREFIX_LEN, RunConfig, Sampling
from bench.data import BUILT_IN, PG19
from bench.prompt_sets import load_prompts
from bench.storage import DTYPES, KV_DTYPES, auto_draft_weights, auto_dtype, resolve_device
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import require_appendable
from common.process import LEADER, world_size
from common.say import note_without_effect
from engine.drafters import check_gamma
from engine.drafters.config import DrafterConfig, ModelDrafterConfig
from engine.drafters.medusa import check_heads
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.standalone import StandaloneConfig
from engine.modes import resolve_mode
from engine.parallel.ranks import check_draft_ranks, check_rank_group, check_replicas, require_single_process
from engine.sampling import SamplingParams
from kv_cache import Policy
from models import ModelConfig
from models.attention import Selection, select_backend
from models.checkpoints.loading import expected_shapes
from models.checkpoints.model_source import ModelSource, check_vocabulary
from models.heads.loading import HeadSource
from models.llama import attention_spec
from models.packed_linear import can_pack
from models.quantize import check_scheme
from models.tensor_parallel import Shard, check_count, shard_config

# A prompt: a text, or its token ids.
PromptText = str | Sequence[int]
# The largest gamma that `--gamma auto` chooses.
AUTO_GAMMA = 6
# The assumed length of a prompt where requests are not known; at most a quarter of a row.
TYPICAL_PROMPT = 2048
# The longest that a rank may wait: what the libraries of ranks can count to.
MOST_SECONDS = 1_000_000


@dataclass(frozen=True)
class DraftPlan:
    """A draft with its sizes, and how it is stored.

    gamma: drafts of every round, or with `auto_gamma` the most of a round. policies, capacities: of its KV cache, and
    the entries of a row; several if one is chosen for every round, those with the largest budgets first. dtype,
    quantize, kv_dtype: of a draft with a policy. source: its model, if not the target. inner: what drafts for it.
    """

    config: DrafterConfig
    gamma: int
    auto_gamma: bool = False
    policies: tuple[Policy, ...] = ()
    capacities: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    source: ModelSource | None = None
    inner: DraftPlan | None = None

    @property
    def policy(self) -> Policy | None:
        return self.policies[0] if self.policies else None

    @property
    def capacity(self) -> int:
        return max(self.capacities, default=0)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers of the target that a self-draft runs; None for all."""
        return self.config.layers if isinstance(self.config, SelfConfig) else None

    @property
    def levels(self) -> tuple[DraftPlan, ...]:
        """The draft, and the drafts that draft for it."""
        return (self, *self.inner.levels) if self.inner else (self,)

    @property
    def weights(self) -> tuple[object, ...]:
        """A key that drafts with the same model have in common."""
        return self.source, self.dtype, self.quantize, self.layers

    @property
    def gammas(self) -> tuple[int, ...]:
        """Every gamma above 0 that a round may have, ascending."""
        return tuple(range(1, self.gamma + 1)) if self.auto_gamma else (self.gamma,)

    @property
    def auto_policy(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and bool(self.config.policies)

    @property
    def auto_budget(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and self.config.auto_budget

    @property
    def automatic(self) -> bool:
        """True if something is chosen before every round."""
        return self.auto_gamma or self.auto_policy or self.auto_budget

    def each(self) -> list[DraftPlan]:
        """Return a draft for each policy, in their order; the draft itself if it has no cache."""
        pairs = zip(self.policies, self.capacities, strict=True)
        return [replace(self, policies=(policy,), capacities=(n,)) for policy, n in pairs] or [self]


@dataclass(frozen=True)
class Plan:
    """A checked run. Sizes are those of one replica; only `n_prompts` counts the prompts of all replicas.

    verification: the mode that verifies drafts. prompts: the user's, as token ids; empty in a server; None if they are
    cut from the dataset. prefix_len: of the longest prompt. capacity: KV entries of a row of the target's cache. group,
    draft_group: ranks that hold the models, in shard order.
    """

    config: RunConfig
    sampling: SamplingParams
    verification: str
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    draft_source: ModelSource | None
    draft: DraftPlan | None
    dataset: str | None
    prompts: list[list[int]] | None
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
        """The most drafts of a round."""
        return self.draft.gamma if self.draft else 0

    @property
    def chooses(self) -> bool:
        """True if there is something to choose before every round."""
        return self.draft is not None and self.draft.automatic and self.gamma > 0 and self.gen_len > 1

    @property
    def reproducible(self) -> bool:
        """True if speculation emits the tokens of plain decoding, not only tokens of their distribution."""
        return self.sampling.greedy or self.verification == "coupled"

    @property
    def shares_weights(self) -> bool:
        """True if the draft runs the target's weights as they are stored."""
        target = None, self.dtype, self.config.target.quantize
        return self.draft is not None and (self.draft.source, self.draft.dtype, self.draft.quantize) == target

    def attention(self, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None = None) -> Selection:
        """Return the backend for a model, or its shard, over such KV entries, and why it is that one."""
        return select_backend(self.config.target.attention, self.device, attention_spec(config, dtype), entries)


def resolve(config: RunConfig, texts: Sequence[PromptText] | None = None, *, max_length: int | None = None) -> Plan:
    """Return the plan of a run: check options, files, contexts and ranks, and replace every `auto`.

    Args:
        texts: prompts in place of the configuration's, or their token ids.
        max_length: the most tokens of a row, for a session whose requests are not known yet; it has no prompts.

    Errors: UserError, the same on every rank.
    """
    stored, sizes = config.target, config.sizes
    for field, size in vars(sizes).items():
        if size is not None:
            require_at_least(field, size, 1)
    require_appendable(config.output.output, "output")
    require_appendable(config.rows.save_rows, "save_rows")
    output, saved = config.output.output, config.rows.save_rows
    if output and saved and os.path.realpath(output) == os.path.realpath(saved):
        where, fix = f"{flag('save_rows')} and {flag('output')}", "name another file for the rows"
        raise ConfigError("rows and records would be mixed", where, output, "two files", fix)
    if config.ranks and not 1 <= (seconds := config.ranks.rank_timeout) <= MOST_SECONDS:
        what, required = "no rank can be waited for that long", f"1 to {MOST_SECONDS} seconds"
        raise ConfigError(what, flag("rank_timeout"), seconds, required, "leave it out")
    params, verification = resolve_sampling(config.sampling)
    _check_oracle(config, params.greedy or verification == "coupled")
    n_ranks = check_replicas(config.n_replicas, world_size())
    device, target = resolve_device(stored.device), stored.source()
    dtype = DTYPES.get(stored.dtype) or auto_dtype(device, target)[0]
    if stored.quantize:
        check_scheme(stored.quantize, device)
    if stored.compile and device == "cpu":
        note_without_effect(["compile"], "a CPU runs the project's kernels in C++, which are faster")
        stored = replace(stored, compile=False)
    rows = config.rows
    if not target.has_text and (useless := [name for name in ("prompts", "stop_at_eos") if getattr(rows, name)]):
        note_without_effect(useless, "random weights have no text")
        rows = replace(rows, prompts=None, stop_at_eos=False)
    config = replace(config, target=stored, rows=rows)
    dataset, prompts = (
        resolve_dataset(config, target),
        _own_prompts(config, target, texts) if max_length is None else [],
    )
    n_rows, n_prompts, prefix_len = sizes.B, sizes.B * config.n_replicas, sizes.prefix_len or DEFAULT_PREFIX_LEN
    length = 0
    if max_length is not None:
        length = min(max_length, target.config.max_context)
        require_at_least("max_length", length, 4)
        dataset, n_prompts, prefix_len = None, 0, min(TYPICAL_PROMPT, length // 4)
        config = replace(config, sizes=replace(sizes, gen_len=length - prefix_len - 1))
    elif prompts is not None:
        dataset, n_prompts, prefix_len = None, len(prompts), max(map(len, prompts))
        require_at_least("prompts", n_prompts, config.n_replicas)
        n_rows = min(sizes.B, math.ceil(n_prompts / config.n_replicas))
    else:
        n_prompts = n_prompts if config.rows.num_prompts is None else config.rows.num_prompts
        require_at_least("num_prompts", n_prompts, config.n_replicas * n_rows)
    source = config.draft.find_source(target, stored.load_format, stored.verify) if config.draft else None
    kv_dtype, groups = KV_DTYPES.get(stored.kv_dtype, dtype), _rank_groups(config, target, source, n_ranks)
    of_models = params, verification, device, dtype, kv_dtype, target, source
    plan = Plan(config, *of_models, None, dataset, prompts, n_rows, n_prompts, prefix_len, length, *groups)
    if stored.attention != AUTO:  # refused before loading, where this machine does not have it
        plan.attention(target.config, dtype)
    plan = with_draft(plan, config.draft)
    if max_length is not None:
        require_at_least("max_length", length, plan.gamma + 4)
        sizes = replace(config.sizes, gen_len=length - prefix_len - plan.gamma - 1)
        return replace(plan, config=replace(plan.config, sizes=sizes))
    if config.passes.measure_costs and not plan.chooses:
        note_without_effect(["measure_costs"], "nothing is auto, so nothing is chosen by them")
    return replace(plan, capacity=_length_in_context(plan))


def with_draft(plan: Plan, config: DrafterConfig | None) -> Plan:
    """Return the plan with another draft of the same models. Errors: ConfigError for a draft that they cannot do."""
    plan = replace(plan, config=replace(plan.config, draft=config), draft=None)
    if config is None:
        return plan
    draft = _resolve_draft(plan, config)
    if config.inner:
        draft = replace(draft, inner=_resolve_draft(plan, config.inner, outer=draft))
    return replace(plan, draft=draft)


def _resolve_draft(plan: Plan, config: DrafterConfig, outer: DraftPlan | None = None) -> DraftPlan:
    """Return a draft for the plan's target, or for the draft `outer`, with its sizes and how it is stored."""
    config.check()
    source, auto_gamma = _draft_source(plan, config, outer), config.gamma == AUTO
    gamma = _most_drafts(config)
    policies: list[Policy] = []
    if isinstance(config, ModelDrafterConfig):
        _check_choice(config)
        policies = [
            one for policy in config.policies or (config.policy,) for one in policy.alternatives(plan.prefix_len)
        ]
        for policy in policies:
            policy.check()
        narrowest = min(policies, key=lambda policy: policy.room)
        gamma = min(gamma, narrowest.room - 1) if auto_gamma else gamma
        check_gamma(gamma, narrowest.room)
    length = plan.capacity or plan.prefix_len + plan.gen_len + gamma + 1
    if source is not None:
        longest = length + (outer.gamma if outer else 0)
        policies = [policy.for_context(source.config.max_context, longest) for policy in policies]
        if not auto_gamma:
            check_heads(gamma, source.most_drafts)
        gamma = min(gamma, source.most_drafts)
    policies.sort(key=lambda policy: -policy.entries(length))
    capacities = tuple(policy.entries(length) for policy in policies)
    draft = DraftPlan(config, gamma, auto_gamma, tuple(policies), capacities, source=source)
    check_layers(draft.layers, plan.target.config.n_layer)
    _check_window(source or plan.target, policies)
    return _stored(plan, config, draft) if isinstance(config, ModelDrafterConfig) else draft


def _most_drafts(config: DrafterConfig) -> int:
    return AUTO_GAMMA if config.gamma == AUTO else int(config.gamma)


def _draft_source(plan: Plan, config: DrafterConfig, outer: DraftPlan | None) -> ModelSource | None:
    """Return the second model that a draft runs, None if there is none. Errors: ConfigError if it is not the plan's."""
    if (path := vars(config).get("draft_model")) is None:
        return None
    source, where = plan.draft_source, flag("draft_of_draft" if outer else "draft_model")
    if source is None or source.path != path:
        required = source.path if source else "no draft model"
        raise ConfigError("a session has one draft model", where, path, required, "open a session with that draft")
    return source


def _check_choice(config: ModelDrafterConfig) -> None:
    """Raise ConfigError where policies or budgets cannot be chosen while decoding."""
    where = flag("draft_policy" if config.policies else "draft_budget")
    if not config.policies and not config.auto_budget:
        return
    if not isinstance(config, SelfConfig):
        what = "a draft with a second model cannot change its cache, which would have to be prefilled again"
        raise ConfigError(what, where, AUTO, "a policy and a number of entries", "name them")
    if any(getattr(text, "ngram_cache", None) for text in config.texts):
        what = "each of the drafts to choose among would save its n-grams"
        raise ConfigError(what, flag("ngram_cache"), f"a file beside {where} {AUTO}", "a fixed draft", "leave it out")


def check_layers(layers: Sequence[int] | None, n_layer: int) -> None:
    """Raise ConfigError unless a draft's layers are layers of the model."""
    if layers and max(layers) >= n_layer:
        what, where, last = "the draft's layers are not all layers of the model", flag("draft_layers"), n_layer - 1
        raise ConfigError(what, where, f"layer {max(layers)}", f"0 to {last}", f"name layers up to {last}")


def _check_window(model: ModelSource, policies: Sequence[Policy]) -> None:
    if model.config.sliding_window is None or not (selecting := [one.name for one in policies if one.selects]):
        return
    what, where = "a policy selects entries that a sliding window hides", f"{flag('draft_policy')} on {model.name}"
    required, fix = "a model that attends to the whole context", f"use {flag('draft_policy')} streaming"
    raise ConfigError(what, where, selecting[0], required, fix)


def _stored(plan: Plan, config: ModelDrafterConfig, draft: DraftPlan) -> DraftPlan:
    """Return the draft with its dtypes and weight scheme. "same" of a self-draft is as the target is stored."""
    target, is_target = plan.config.target, isinstance(config, SelfConfig)
    dtype = DTYPES.get(config.draft_dtype, plan.dtype)
    if config.draft_dtype == AUTO and plan.dtype == torch.float32 and can_pack(plan.device, torch.bfloat16):
        dtype = torch.bfloat16
    quantize: str | None = None if config.draft_weights in (AUTO, "same") else config.draft_weights
    is_auto = config.draft_weights == config.draft_dtype == AUTO and target.quantize is None
    if is_auto and not isinstance(draft.source, HeadSource):
        model, group = draft.source or plan.target, plan.draft_group if draft.source else plan.group
        quantize = auto_draft_weights(plan.device, dtype, _linear_shapes(model.config, len(group)), model.published)
    if quantize is None and is_target:
        quantize = target.quantize
    if quantize:
        check_scheme(quantize, plan.device)
    entries = target.kv_dtype if is_target and config.draft_kv_dtype == "same" else config.draft_kv_dtype
    return replace(draft, dtype=dtype, quantize=quantize, kv_dtype=KV_DTYPES.get(entries, dtype))


def _linear_shapes(config: ModelConfig, n_ranks: int) -> list[tuple[int, ...]]:
    """Return shapes `(d_out, d_in)` of the linear layers of a block, of the shards of every rank."""
    each = [expected_shapes(shard_config(config, Shard(rank, n_ranks))) for rank in range(n_ranks)]
    return [shape for shapes in each for name, shape in shapes.items() if name[:9] == "layers.0." and len(shape) == 2]


def resolve_several(
    config: RunConfig,
    drafts: Sequence[DrafterConfig],
    texts: Sequence[PromptText] | None = None,
    in_turn: bool = False,
) -> Plan:
    """Return a plan for several drafts of the same models, with room for rounds of all gammas, and for all caches.

    in_turn: a single draft has a cache at any time. Errors: UserError.
    """
    deepest = max(drafts, key=lambda draft: (_most_drafts(draft), draft.has_model))
    plan = resolve(replace(config, draft=deepest), texts)
    planned = (with_draft(plan, draft).draft for draft in drafts)
    each = [one for draft in planned if draft for one in draft.each() if one.policy]
    each.sort(key=lambda draft: -draft.capacity)

    def n_bytes(draft: DraftPlan) -> int:
        assert draft.policy and draft.kv_dtype
        return draft.policy.new_cache(plan.target.config, 1, plan.capacity, "meta", draft.kv_dtype).n_bytes

    if in_turn and each:
        each = [max(each, key=n_bytes)]
    policies = tuple(policy for draft in each for policy in draft.policies)
    capacities = tuple(draft.capacity for draft in each)
    assert plan.draft is not None
    return replace(plan, draft=replace(plan.draft, policies=policies, capacities=capacities))


def resolve_sampling(sampling: Sampling) -> tuple[SamplingParams, str]:
    """Return how tokens are drawn, and the verification mode. Errors: ConfigError for a mode that cannot verify it."""
    params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0)
    if params.greedy:
        given = {"top_k": params.top_k > 0, "top_p": params.top_p < 1, "seed": sampling.seed is not None}
        if unused := [name for name, is_given in given.items() if is_given]:
            note_without_effect(unused, "temperature 0 is greedy")
        params = SamplingParams()
    return params, resolve_mode(sampling.mode, [params])


def resolve_dataset(config: RunConfig, target: ModelSource) -> str | None:
    """Return the data set of a run, None for random weights. `auto`: the book of the built-in model, else PG-19."""
    if not target.has_text:
        return None
    return config.text.dataset if config.text.dataset != AUTO else BUILT_IN if target.is_default else PG19


def _own_prompts(config: RunConfig, target: ModelSource, texts: Sequence[PromptText] | None) -> list[list[int]] | None:
    """Return the user's prompts as token ids, None if there are none: `texts`, or those that `--prompts` names, of
    conversations the first turns. Errors: UserError."""
    named = config.rows.prompts
    if texts is None and named is None:
        return None
    given: dict[str, Any] = {"prefix_len": config.sizes.prefix_len, "num_prompts": config.rows.num_prompts}
    if unused := [name for name, value in given.items() if value]:
        note_without_effect(unused, "prompts are taken whole, and all of them")
    if texts is not None and (isinstance(texts, str) or not texts or not all(texts) or not target.has_text):
        what, required = "these prompts cannot be continued", "texts, none of them empty, and a trained model"
        raise ConfigError(what, "Session.open: prompts", repr(texts)[:80], required, "give [text, text, ...]")
    tokenizer = target.tokenizer()
    texts = [prompt.turns[0] for prompt in load_prompts(str(named))] if texts is None else texts
    prompts = [tokenizer.encode(text, add_bos=True) if isinstance(text, str) else list(text) for text in texts]
    target.check_tokens(prompts)
    return prompts


def _check_oracle(config: RunConfig, reproducible: bool) -> None:
    if config.draft and config.draft.needs_baseline and (config.passes.no_baseline or not reproducible):
        what, where = "an oracle drafts the tokens of plain decoding", f"{flag('draft')} {config.draft.name}"
        seen = f"rejection verification, or {flag('no_baseline')}"
        required = "greedy or coupled verification, which repeats plain decoding, and plain decoding"
        raise ConfigError(what, where, seen, required, f"use {flag('verification')} coupled, and both passes")


def _length_in_context(plan: Plan) -> int:
    """Return the tokens of the longest row, with the drafts of its last round. Errors: ConfigError for too many."""
    length, context = plan.prefix_len + plan.gen_len + plan.gamma + 1, plan.target.config.max_context
    if length <= context:
        return length
    what = "prompt + new tokens + gamma + 1 exceeds the model's context"
    where = f"{flag('prefix_len' if plan.prompts is None else 'prompts')}, {flag('gen_len')} and {flag('gamma')}"
    seen = f"{plan.prefix_len} + {plan.gen_len} + {plan.gamma} + 1 = {length} tokens"
    raise ConfigError(what, where, seen, f"<= {context}", "use shorter prompts, or fewer new tokens")


def _rank_groups(
    config: RunConfig, target: ModelSource, draft_source: ModelSource | None, n_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a replica that hold the target, and those that hold a standalone draft."""
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
        if tail := check_vocabulary(plan.target, level.source):
            said.append(tail)
        context, end = level.source.config.max_context, longest + plan.gamma
        reach = min(level.capacity, end) if level.policy.in_cache_positions else end
        if reach > context:
            said.append(f"{level.source.name} was trained on {context} positions, and is used up to {reach}")
    return said
