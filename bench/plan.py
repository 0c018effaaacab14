"""Plan: a run that was checked, with every `auto` resolved and nothing loaded; `resolve` makes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from bench.config import AUTO, DEFAULT_PREFIX_LEN, ComparedSampling, Rows, RunConfig, Sampling
from bench.data import load_prompts, resolve_dataset
from common.errors import ConfigError, flag, refuse, require_at_least
from common.plug_ins import errors_refused
from common.process import LEADER
from common.say import note_without_effect, say
from engine.drafters.config import DrafterConfig, DraftPlan, Trait, plug_ins
from engine.drafters.stored import PlannedTarget, Weights
from engine.modes import resolve_mode
from engine.parallel.ranks import replica_group, require_single_process
from engine.sampling.distribution import SamplingParams
from models.attention import select_backend
from models.checkpoints.model_source import ModelSource
from models.kernels.quantize import check_scheme
from models.llama import attention_spec
from models.storage import DTYPES, KV_DTYPES, auto_dtype, resolve_device
from models.tensor_parallel import check_count

# The assumed length of a prompt while requests are not known; at most a quarter of a row.
TYPICAL_PROMPT = 2048
# The least tokens of a prompt and its answer that a row has room for while requests are not known.
LEAST_ROOM = 32
# A prompt: a text, or its token ids.
PromptText = str | Sequence[int]


@dataclass(frozen=True)
class Plan:
    """A checked run. target: with the sizes of a replica; n_prompts counts the prompts of all replicas.

    verification: the mode that verifies drafts. candidates: the drafts, each with one policy and one budget, that
    rounds choose among, or the single draft of all rounds; empty for plain decoding. prompts: the user's prompts as
    token ids; empty in a server; None if they are cut from the dataset. n_resident: the most candidates whose caches
    are in memory together; None: all.
    """

    config: RunConfig
    target: PlannedTarget
    dataset: str | None
    prompts: list[list[int]] | None
    n_prompts: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    verification: str = AUTO
    candidates: tuple[DraftPlan, ...] = ()
    n_resident: int | None = None

    @property
    def gamma(self) -> int:
        """The most draft tokens of a round."""
        return max((draft.gamma for draft in self.candidates), default=0)

    @property
    def gammas(self) -> tuple[int, ...]:
        """Every gamma above 0 that a round may have, ascending."""
        return tuple(range(1, self.gamma + 1)) if "gamma" in self.automatic else (self.gamma,)

    @property
    def automatic(self) -> tuple[str, ...]:
        """The options of drafts that are chosen before every round."""
        names = dict.fromkeys(name for draft in self.config.drafts for name in draft.automatic)
        kinds = [draft.kind for draft in self.config.drafts]
        return *names, *(["draft_policy"] if len(set(kinds)) < len(kinds) else [])

    @property
    def chooses(self) -> bool:
        """True if a decode has rounds, and something is chosen before each."""
        return bool(self.automatic) and self.gamma > 0 and self.target.gen_len > 1

    @property
    def needs_baseline(self) -> bool:
        """True if drafts are made from the tokens of plain decoding, which has to run first."""
        return any(Trait.NEEDS_BASELINE in draft.config.traits for draft in self.candidates)

    @property
    def reproducible(self) -> bool:
        """True if speculation emits the tokens of plain decoding, not only tokens of their distribution."""
        return self.sampling.greedy or self.verification == "coupled"

    def remarks(self) -> list[str]:
        """Return what a user should read about the drafts. Errors: ConfigError for one of another vocabulary."""
        drafts = self.candidates[: 1 if self.config.passes.ablate else None]
        return list(dict.fromkeys(remark for draft in drafts for remark in draft.remarks(self.target)))

    def with_sampling(self, sampling: Sampling) -> Plan:
        """Return the plan with another distribution of tokens, and the mode that verifies drafts of them. Errors:
        ConfigError for a mode that cannot verify it."""
        edits: dict[str, Any] = {name: getattr(sampling, name) for name in ("repetition_penalty", "min_tokens")}
        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0, sampling.min_p
        params = SamplingParams(*filters, **edits)
        if params.greedy:
            of_samples = ("top_k", "top_p", "min_p", "seed")
            if unused := [name for name in of_samples if getattr(sampling, name) != getattr(Sampling, name)]:
                note_without_effect(unused, "temperature 0 is greedy")
            params = SamplingParams(**edits)
        config = replace(self.config, sampling=sampling)
        mode = (ComparedSampling(**vars(sampling)) if config.passes.ablate else sampling).mode
        mode = resolve_mode(mode, [params])
        if config.passes.ablate and mode == "rejection":
            say("note: in rejection mode each draft decodes another text; --verification coupled gives all the same")
        plan = replace(self, config=config, sampling=params, verification=mode)
        repeats_plain = plan.reproducible and not config.passes.no_baseline
        return replace(plan, target=replace(self.target, repeats_plain=repeats_plain))

    @errors_refused(*plug_ins())
    def with_drafts(self, *drafts: DrafterConfig) -> Plan:
        """Return the plan with other drafts to choose among. Errors: ConfigError for drafts that the target cannot
        have."""
        config = self.config.with_drafts(*drafts)
        plans = candidates(drafts, self.target, config.passes.ablate)
        return replace(self, config=config, candidates=plans)

    def sized(self) -> Plan:
        """Return the plan with room for the longest row, and the drafts of its last round, in the target's cache.
        Errors: ConfigError for more tokens than the model's context has."""
        target, context = self.target, self.target.source.config.max_context
        length = target.prefix_len + target.gen_len + self.gamma + 1
        if length > context:
            prompts = flag("prefix_len" if self.prompts is None else "prompts")
            where = f"{prompts}, {flag('gen_len')} and {flag('gamma')}"
            seen = f"{target.prefix_len} + {target.gen_len} + {self.gamma} + 1 = {length} tokens"
            fix = "use shorter prompts or fewer new tokens"
            if length <= 4 * context:
                fix += f", or {flag('rope_scaling')} yarn:4"
            refuse(where, seen, f"<= {context}", "prompt + new tokens + gamma + 1 exceeds the model's context", fix)
        return replace(self, target=replace(target, capacity=length))


def candidates(drafts: Sequence[DrafterConfig], target: PlannedTarget, ablate: bool) -> tuple[DraftPlan, ...]:
    """Return a plan for each draft, policy and budget to choose among, of each kind the largest cache first.

    ablate: return the plan of the draft, and of the same with all entries, with the target's weights, and with both,
    without repetitions. Errors: ConfigError for drafts that cannot be had, chosen among, or ablated.
    """
    check_choice(drafts)
    kinds = [draft.kind for draft in drafts]
    if ablate:
        if len(drafts) > 1 or any(draft.automatic for draft in drafts):
            what, fix = "a draft is taken apart that is the same in all rounds", "name numbers and a policy"
            refuse("ablate", AUTO, "one draft with one policy, budget and gamma", what, fix)
        plans = [draft.ablated(*has).plan(target) for has in product((True, False), repeat=2) for draft in drafts]
        found = dict[str, DraftPlan]()
        for plan in plans:
            whole = {"draft_policy": "full", "draft_budget": target.length(plan.gamma)}
            found.setdefault(str(plan.record() | (whole if plan.budget_covers(target) else {})), plan)
        plans = [*found.values()]
        if len(plans) < 2 or not plans[0].gamma:
            required = "a draft over a cache, with cheaper weights or fewer entries than the target"
            what, fix = "there is nothing to ablate", f"leave out {flag('ablate')}"
            seen = "no draft"
            if plans:
                lacks = "reads the target's weights and all entries" if plans[0].policy else "has no cache"
                seen = f"draft {kinds[0]}, which {lacks if plans[0].gamma else 'drafts no tokens'}"
            refuse("ablate", seen, required, what, fix)
        return tuple(plans)
    plans = [each.plan(target) for draft in drafts for each in draft.alternatives(target.prefix_len)]
    plans.sort(key=lambda plan: (kinds.index(plan.config.kind), -plan.capacity))
    if len(set(kinds)) > 1 and (small := [plan for plan in plans if plan.gamma < 1]):
        what = "the draft's cache has no room for a verification block"
        refuse("draft_budget", small[0].capacity, "room for 2 tokens", what, f"use a larger {flag('draft_budget')}")
    return tuple(plans)


def check_choice(drafts: Sequence[DrafterConfig]) -> None:
    """Raise ConfigError if drafts cannot be chosen among while decoding."""
    for n, draft in enumerate(drafts):
        if draft in drafts[:n]:
            what, fix = "a draft is named twice", f"leave out {draft.kind}"
            refuse("auto_drafts", draft.kind, f"other drafts than {flag('draft')}, each once", what, fix)
        if draft.kind == drafts[0].kind:
            continue
        if fixed := [each.gamma for each in drafts if each.gamma != AUTO]:
            what, required = "drafts are chosen together with gamma", f"{flag('gamma')} auto"
            refuse("auto_drafts", f"{flag('gamma')} {fixed[0]}", required, what, f"use {required}")
        if draft.traits & (Trait.SECOND_MODEL | Trait.HIERARCHICAL | Trait.NEEDS_BASELINE):
            what, fix = "this draft cannot take another draft's place", f"leave out {draft.kind} here"
            required = f"self without {flag('draft_of_draft')}, or a draft from text"
            refuse("auto_drafts", draft.kind, required, what, fix)


def resolve(config: RunConfig, texts: Sequence[PromptText] | None = None, *, max_length: int | None = None) -> Plan:
    """Return the plan of a run: check options, files, contexts and ranks, and replace every `auto`.

    Args:
        texts: prompts, or their token ids, in place of the configuration's.
        max_length: the most tokens of a row, for a session without prompts whose requests come later.

    Errors: UserError, the same on every rank.
    """
    config.check()
    stored, sizes = config.target, config.sizes
    device, source = resolve_device(stored.device), stored.source()
    dtype = DTYPES.get(stored.dtype) or auto_dtype(device, source)[0]
    if stored.quantize:
        check_scheme(stored.quantize, device, source.config.n_expert, flag("quantize"))
    group: tuple[int, ...] = (LEADER,)
    if config.ranks is None:
        require_single_process()
    else:
        group = replica_group(config.n_replicas, config.ranks.rank_group)
        check_count(source.config, len(group), f"{flag('rank_group')} (all ranks, if not given)")
    config = _without_unused(config, device, source.has_text, texts is not None or max_length is not None)
    prompts = _given_prompts(config.rows, source, texts) if max_length is None else []
    n_rows, n_replicas, capacity = sizes.B, config.n_replicas, 0
    if max_length is not None:
        capacity = min(max_length, source.config.max_context)
        if capacity < max_length:
            say(f"note: rows hold {capacity} tokens, the model's context, not {max_length}")
        n_prompts, prefix_len = 0, min(TYPICAL_PROMPT, capacity // 4)
    elif prompts is not None:
        n_prompts, prefix_len = len(prompts), max(map(len, prompts))
        n_rows = min(n_rows, math.ceil(n_prompts / n_replicas))
        require_at_least("prompts", n_prompts, n_replicas)
    else:
        n_prompts = n_replicas * n_rows if config.rows.num_prompts is None else config.rows.num_prompts
        prefix_len = sizes.prefix_len or DEFAULT_PREFIX_LEN
        require_at_least("num_prompts", n_prompts, n_replicas * n_rows)
    dataset = resolve_dataset(config.text.dataset, source, n_prompts * prefix_len) if prompts is None else None
    if stored.attention != AUTO:  # refused before loading, where this machine does not have it
        select_backend(stored.attention, device, attention_spec(source.config, dtype))
    target = PlannedTarget(
        weights=Weights(source, dtype, stored.quantize),
        kv_dtype=KV_DTYPES.get(stored.kv_dtype, dtype),
        device=device,
        group=group,
        n_rows=n_rows,
        prefix_len=prefix_len,
        gen_len=sizes.gen_len,
        capacity=capacity,
        attention=stored.attention,
        compile=config.target.compile,
        load_format=stored.load_format,
        changes=stored.changes,
    )
    plan = Plan(config, target, dataset, prompts, n_prompts).with_sampling(config.sampling)
    plan = plan.with_drafts(*config.drafts)
    if max_length is None:
        return plan.sized()
    require_at_least("max_length", capacity, LEAST_ROOM + plan.gamma + 1)
    return replace(plan, target=replace(plan.target, gen_len=capacity - prefix_len - plan.gamma - 1))


def resolve_each(
    config: RunConfig, choices: Sequence[tuple[DrafterConfig, ...]], texts: Sequence[PromptText] | None = None
) -> Plan:
    """Return a plan for several runs of the same target, each with drafts to choose among: with room for rounds of all
    gammas, and for the caches of all drafts if any run chooses while decoding, else of one at a time. Errors:
    UserError."""
    plan = resolve(config.with_drafts(*choices[0]), texts)
    runs = [plan.with_drafts(*drafts) for drafts in choices]
    choosing = next((run for run in runs if run.chooses), None)
    candidates = tuple(draft for run in runs for draft in run.candidates)
    return replace(choosing or plan, candidates=candidates, n_resident=None if choosing else 1).sized()


def _without_unused(config: RunConfig, device: str, has_text: bool, has_prompts: bool) -> RunConfig:
    """Return the configuration without options that have no effect here, which notes name."""
    target, rows = config.target, config.rows
    if target.compile and device == "cpu":
        note_without_effect(["compile"], "a CPU runs the project's kernels in C++, which are faster")
        target = replace(target, compile=False)
    given = vars(rows) | {name: value for draft in config.drafts for name, value in draft.options().items()}
    unused = [name for name in ("draft_text", "prompts", "stop_at_eos") if given.get(name)]
    if unused and not has_text:
        note_without_effect(unused, "random weights have no text")
        rows = replace(rows, prompts=None, stop_at_eos=False)
    if config.sampling.min_tokens and not (rows.stop_at_eos or has_prompts):
        note_without_effect(["min_tokens"], f"rows have a fixed length without {flag('stop_at_eos')}")
    if rows.prompts and config.text.dataset != AUTO:
        note_without_effect(["dataset"], f"prompts are those of {flag('prompts')}")
    given = {"prefix_len": config.sizes.prefix_len, "num_prompts": rows.num_prompts}
    if (has_prompts or rows.prompts) and (unused := [name for name, value in given.items() if value]):
        note_without_effect(unused, "prompts are taken whole, and all of them")
    if rows.chat and rows.prompts is None and not has_prompts:
        note_without_effect(["chat"], f"only {flag('prompts')} are put into the template")
    return replace(config, target=target, rows=rows)


def _given_prompts(rows: Rows, target: ModelSource, texts: Sequence[PromptText] | None) -> list[list[int]] | None:
    """Return the user's prompts as token ids: `texts`, or the first turns of the prompts that `rows` names (see
    `load_prompts`), in the chat template with `rows.chat`; None without both. Errors: UserError."""
    if texts is None and rows.prompts is None:
        return None
    if texts is not None and (isinstance(texts, str) or not texts or not all(texts) or not target.has_text):
        what, required = "these prompts cannot be continued", "texts, none of them empty, and a trained model"
        raise ConfigError(what, "Session.open: prompts", repr(texts)[:80], required, "give [text, text, ...]")
    tokenizer = target.tokenizer()
    if texts is None:
        texts = [prompt.turns[0] for prompt in load_prompts(str(rows.prompts))]
        if rows.chat:
            template = target.chat_template()
            texts = [template.encode([{"role": "user", "content": text}]) for text in texts]
    prompts = [tokenizer.encode(text, add_bos=True) if isinstance(text, str) else list(text) for text in texts]
    target.check_tokens(prompts)
    return prompts
