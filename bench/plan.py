"""A run's plan: its configuration with every `auto` resolved and everything checked, before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
# The length that prompts are taken to have where requests are not known, if rows are at least four times as long.
TYPICAL_PROMPT = 2048


@dataclass(frozen=True)
class DraftPlan:
    """A draft with every `auto` resolved that does not stay open until rounds run.

    Attributes:
        gamma: drafts of every round, or with `auto_gamma` the most of a round.
        policies: of its KV cache; several if one is chosen for every round, those with the largest budgets first.
        capacities: KV entries of a row, for each policy.
        dtype, quantize, kv_dtype: of the weights and KV entries of a draft with a policy, else None.
        source: its model, if that is not the target.
        inner: the draft that drafts for this one.
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

    Attributes:
        sampling, verification: how tokens are drawn, and the mode that verifies drafts.
        prompts: the user's, as token ids; none yet in a server; None if they are cut from the dataset.
        prefix_len: tokens of the longest prompt.
        capacity: KV entries of a row of the target's cache.
        group, draft_group: ranks that hold the models, in shard order.
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
    _check_files(config)
    params, verification = resolve_sampling(config.sampling)
    _check_oracle(config, verification, params.greedy or verification == "coupled")
    n_ranks = check_replicas(config.n_replicas, world_size())
    device, target = resolve_device(stored.device), stored.source()
    dtype = DTYPES.get(stored.dtype) or auto_dtype(device, target)[0]
    if stored.quantize:
        check_scheme(stored.quantize, device)
    if stored.compile and device == "cpu":
        note_without_effect(["compile"], "a CPU runs the project's kernels in C++, which are faster")
        stored = replace(stored, compile=False)
    config = replace(config, target=stored, rows=replace(config.rows, stop_at_eos=_stops(config, target)))
    dataset, prompts = resolve_dataset(config, target), [] if max_length else _own_prompts(config, target, texts)
    n_rows, n_prompts, prefix_len = sizes.B, sizes.B * config.n_replicas, sizes.prefix_len or DEFAULT_PREFIX_LEN
    length = 0
    if max_length:
        length = min(max_length, target.config.max_context)
        require_at_least("max_length", length, 4)
        dataset, n_prompts, prefix_len = None, 0, min(TYPICAL_PROMPT, length // 4)
        config = replace(config, sizes=replace(sizes, gen_len=length - prefix_len - 1))
    elif prompts is not None:
        dataset, n_prompts, prefix_len = None, len(prompts), max(map(len, prompts))
        n_rows = min(sizes.B, math.ceil(n_prompts / config.n_replicas))
    else:
        n_prompts = config.rows.num_prompts or n_prompts
        require_at_least("num_prompts", n_prompts, config.n_replicas * n_rows)
    if not max_length and n_prompts < config.n_replicas:
        where, seen = (
            f"{flag('prompts')}, {flag('data_parallel')}",
            f"{n_prompts} prompts, {config.n_replicas} replicas",
        )
        fix = f"use {flag('data_parallel')} {n_prompts} or less"
        raise ConfigError("there are fewer prompts than replicas", where, seen, "a prompt for every replica", fix)
    source = config.draft.find_source(target, stored.load_format, stored.verify) if config.draft else None
    kv_dtype, groups = KV_DTYPES.get(stored.kv_dtype, dtype), _rank_groups(config, target, source, n_ranks)
    of_models = params, verification, device, dtype, kv_dtype, target, source
    plan = Plan(config, *of_models, None, dataset, prompts, n_rows, n_prompts, prefix_len, length, *groups)
    if stored.attention != AUTO:  # refused before loading, where this machine does not have it
        plan.attention(target.config, dtype)
    plan = with_draft(plan, config.draft)
    if max_length:
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
    gamma = AUTO_GAMMA if config.gamma == AUTO else config.gamma
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
        check_gamma(gamma, narrowest.room, narrowest.for_block(gamma + 1))
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


def _draft_source(plan: Plan, config: DrafterConfig, outer: DraftPlan | None) -> ModelSource | None:
    """Return the second model that a draft runs, None if there is none. Errors: ConfigError if it is not the plan's."""
    if (path := vars(config).get("draft_model")) is None:
        return None
    source = plan.draft_source
    if source is None or source.path != path:
        seen = source.path if source else "no draft model: the session was opened without"
        where = flag("draft_of_draft" if outer else "draft_model")
        raise ConfigError("a session has one draft model", where, path, seen, "open a session with that draft")
    return source


def _check_choice(config: ModelDrafterConfig) -> None:
    """Raise ConfigError where policies or budgets cannot be chosen while decoding."""
    if not config.policies and not config.auto_budget:
        return
    if not isinstance(config, SelfConfig):
        where = flag("draft_policy" if config.policies else "draft_budget")
        what = "a draft with a second model cannot change its cache, which would have to be prefilled again"
        fix = "compare with reproduce/acceptance.py --draft_model D --policies streaming snapkv --budgets 64 256"
        raise ConfigError(what, where, AUTO, "a policy and a number of entries", f"{fix}, and name one")
    if any(getattr(text, "ngram_cache", None) for text in config.texts):
        what, where = "each of the drafts to choose among would save its n-grams", flag("ngram_cache")
        raise ConfigError(what, where, f"a file beside {AUTO}", "one policy and one budget", f"leave out {where}")


def check_layers(layers: Sequence[int] | None, n_layer: int) -> None:
    """Raise ConfigError unless a draft's layers are layers of the model."""
    if layers and max(layers) >= n_layer:
        what, seen = "the draft's layers are not all layers of the model", f"layer {max(layers)}"
        fix = f"name layers below {n_layer}, such as 0-{n_layer - 1}"
        raise ConfigError(what, flag("draft_layers"), seen, f"0 to {n_layer - 1}", fix)


def _check_window(model: ModelSource, policies: Sequence[Policy]) -> None:
    window, selecting = model.config.sliding_window, [policy.name for policy in policies if policy.selects]
    if selecting and window is not None:
        what, where = f"{selecting[0]} selects entries that a sliding window hides", flag("draft_policy")
        seen = f"{selecting[0]}, and a model with a sliding window of {window} tokens"
        required, fix = "a model that attends to the whole context", f"use {where} streaming"
        raise ConfigError(what, f"{where} on {model.name}", seen, required, fix)


def _stored(plan: Plan, config: ModelDrafterConfig, draft: DraftPlan) -> DraftPlan:
    """Return the draft with its dtypes and weight scheme. "same" of a self-draft is as the target is stored."""
    target, is_target = plan.config.target, isinstance(config, SelfConfig)
    dtype = DTYPES.get(config.draft_dtype, plan.dtype)
    if config.draft_dtype == AUTO and plan.dtype == torch.float32 and can_pack(plan.device, torch.bfloat16):
        dtype = torch.bfloat16
    quantize = None if config.draft_weights in (AUTO, "same") else config.draft_weights
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
    at_once: Literal["all", "one of each budget", "one"] = "all",
    texts: Sequence[PromptText] | None = None,
) -> Plan:
    """Return a plan for several drafts of the same models, with room for rounds of all gammas.

    at_once: the drafts whose caches are in memory at the same time. Errors: UserError.
    """

    def gamma_of(draft: DrafterConfig) -> int:
        return AUTO_GAMMA if draft.gamma == AUTO else draft.gamma

    plan = resolve(replace(config, draft=max(drafts, key=lambda draft: (gamma_of(draft), draft.has_model))), texts)
    assert plan.draft is not None
    each = [one for draft in drafts if (own := with_draft(plan, draft).draft) for one in own.each() if one.policy]

    def n_bytes(draft: DraftPlan) -> int:
        assert draft.policy and draft.kv_dtype
        return draft.policy.new_cache(plan.target.config, 1, plan.capacity, "meta", draft.kv_dtype).n_bytes

    each.sort(key=lambda draft: (draft.capacity, n_bytes(draft)), reverse=True)
    if at_once == "one":
        each = [max(each, key=n_bytes)] if each else []
    elif at_once == "one of each budget":
        each = [*{draft.capacity: draft for draft in reversed(each)}.values()][::-1]
    policies = tuple(policy for draft in each for policy in draft.policies)
    capacities = tuple(draft.capacity for draft in each)
    chooses = plan.draft.auto_gamma if at_once == "one" else len(drafts) > 1
    return replace(plan, draft=replace(plan.draft, policies=policies, capacities=capacities, auto_gamma=chooses))


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
    """Return the data set of a run, None for random weights. `auto`: the built-in book of the built-in model, or PG-19."""
    if not target.has_text:
        return None
    return config.text.dataset if config.text.dataset != AUTO else BUILT_IN if target.is_default else PG19


def _stops(config: RunConfig, target: ModelSource) -> bool:
    """Return whether rows stop at the end token; note the flags that have no effect on random weights."""
    if target.has_text:
        return config.rows.stop_at_eos
    given = {"dataset": config.text.dataset != AUTO, "prompts": config.rows.prompts, "verify": config.target.verify}
    if unused := [name for name, value in (given | {"stop_at_eos": config.rows.stop_at_eos}).items() if value]:
        note_without_effect(unused, "random weights read neither a checkpoint nor a text")
    return False


def _own_prompts(config: RunConfig, target: ModelSource, texts: Sequence[PromptText] | None) -> list[list[int]] | None:
    """Return the user's prompts as token ids, None if there are none: `texts`, or those that `--prompts` names, of
    conversations the first turns. Errors: UserError."""
    named = config.rows.prompts if target.has_text else None
    if texts is None and named is None:
        return None
    given = {"prompts": texts is not None and named is not None, "dataset": config.text.dataset != AUTO}
    given |= {"prefix_len": config.sizes.prefix_len, "num_prompts": config.rows.num_prompts}
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


def _check_files(config: RunConfig) -> None:
    output, rows = config.output.output, config.rows.save_rows
    require_appendable(output, "output")
    require_appendable(rows, "save_rows")
    if rows and output and os.path.realpath(rows) == os.path.realpath(output):
        where, fix = f"{flag('save_rows')} and {flag('output')}", "name another file for the rows"
        raise ConfigError("rows and records would be mixed", where, output, "two files", fix)
    # The libraries of the ranks cannot count further.
    if config.ranks and not 1 <= (seconds := config.ranks.rank_timeout) <= 1_000_000:
        what, required = "ranks cannot wait that long", "1 to 1000000 seconds"
        raise ConfigError(what, flag("rank_timeout"), seconds, required, "leave it out")


def _check_oracle(config: RunConfig, verification: str, reproducible: bool) -> None:
    if config.draft and config.draft.needs_baseline and (config.passes.no_baseline or not reproducible):
        what, where = "an oracle drafts the tokens of plain decoding", f"{flag('draft')} {config.draft.name}"
        seen = f"{verification} verification" + f", {flag('no_baseline')}" * config.passes.no_baseline
        required = f"greedy or coupled verification, which repeats plain decoding, and no {flag('no_baseline')}"
        fix = f"leave out {flag('no_baseline')}" if reproducible else f"use {flag('verification')} coupled"
        raise ConfigError(what, where, seen, required, fix)


def _length_in_context(plan: Plan) -> int:
    """Return the tokens of the longest row, with the drafts of its last round. Errors: ConfigError for too many."""
    length, context = plan.prefix_len + plan.gen_len + plan.gamma + 1, plan.target.config.max_context
    if length <= context:
        return length
    room = context - plan.gamma - 1
    what = "prompt + new tokens + gamma + 1 exceeds the model's context"
    where = f"{flag('prefix_len' if plan.prompts is None else 'prompts')}, {flag('gen_len')} and {flag('gamma')}"
    seen = f"{plan.prefix_len} + {plan.gen_len} + {plan.gamma} + 1 = {length} tokens"
    fix = f"shorten prompts or {flag('gen_len')}: there is room for {room} prompt and new tokens together"
    raise ConfigError(what, f"{where} on {plan.target.name}", seen, f"<= {context}", fix)


def _rank_groups(
    config: RunConfig, target: ModelSource, draft_source: ModelSource | None, n_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of a replica that hold the target, and those that hold a standalone draft."""
    if config.ranks is None:
        require_single_process()
        return (LEADER,), (LEADER,)
    group = check_rank_group(config.ranks.rank_group, n_ranks, config.n_replicas)
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
    if draft and not draft.auto_gamma and draft.gamma >= plan.gen_len > 1:  # the first token comes from the prompt
        said.append(f"a round drafts up to {draft.gamma} tokens, of which a row takes at most {plan.gen_len - 1}")
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
