"""Plan: a run that was checked, with every `auto` resolved and nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.config import RunConfig
from common.errors import flag, refuse
from engine.drafters.config import AUTO, DrafterConfig, DraftPlan, Trait
from engine.drafters.stored import PlannedTarget, Weights
from engine.sampling.distribution import SamplingParams
from models.checkpoints.model_source import ModelSource

# A prompt: a text, or its token ids.
PromptText = str | Sequence[int]


@dataclass(frozen=True)
class Plan:
    """A checked run. Sizes are per replica, but `n_prompts` counts the prompts of all replicas.

    verification: the mode that verifies drafts. candidates: the drafts, each with one policy and one budget, that
    rounds choose among, or the single draft of all rounds; empty for plain decoding. prompts: the user's prompts as
    token ids; empty in a server; None if they are cut from the dataset. prefix_len: tokens of the longest prompt.
    capacity: KV entries of a row of the target's cache. group: ranks that hold the target, in shard order.
    """

    config: RunConfig
    sampling: SamplingParams
    verification: str
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    candidates: tuple[DraftPlan, ...]
    dataset: str | None
    prompts: list[list[int]] | None
    n_rows: int
    n_prompts: int
    prefix_len: int
    capacity: int
    group: tuple[int, ...]

    @property
    def gen_len(self) -> int:
        return self.config.sizes.gen_len

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
        return bool(self.automatic) and self.gamma > 0 and self.gen_len > 1

    @property
    def needs_baseline(self) -> bool:
        """True if drafts are made from the tokens of plain decoding, which has to run first."""
        return any(Trait.NEEDS_BASELINE in draft.config.traits for draft in self.candidates)

    @property
    def reproducible(self) -> bool:
        """True if speculation emits the tokens of plain decoding, not only tokens of their distribution."""
        return self.sampling.greedy or self.verification == "coupled"

    @property
    def planned_target(self) -> PlannedTarget:
        """The target and the sizes that drafts are planned for."""
        stored = self.config.target
        return PlannedTarget(
            weights=Weights(self.target, self.dtype, stored.quantize),
            kv_dtype=self.kv_dtype,
            device=self.device,
            group=self.group,
            prefix_len=self.prefix_len,
            gen_len=self.gen_len,
            capacity=self.capacity,
            attention=stored.attention,
            compile=stored.compile,
            load_format=stored.load_format,
            verify=stored.verify,
            changes=stored.changes,
            repeats_plain=self.reproducible and not self.config.passes.no_baseline,
        )

    def remarks(self) -> list[str]:
        """Return what a user should read about the drafts. Errors: ConfigError for one of another vocabulary."""
        target = self.planned_target
        return list(dict.fromkeys(remark for draft in self.candidates for remark in draft.remarks(target)))

    def with_drafts(self, draft: DrafterConfig | None, auto_drafts: tuple[DrafterConfig, ...] = ()) -> Plan:
        """Return the plan with other drafts of the same target. Errors: ConfigError for drafts that it cannot have."""
        config = replace(self.config, draft=draft, auto_drafts=auto_drafts)
        return replace(self, config=config, candidates=candidates(config.drafts, self.planned_target))


def candidates(drafts: Sequence[DrafterConfig], target: PlannedTarget) -> tuple[DraftPlan, ...]:
    """Return a plan for each draft, policy and budget to choose among, of each kind the largest cache first.

    Errors: ConfigError for drafts that cannot be had, or chosen among.
    """
    check_choice(drafts)
    kinds = [draft.kind for draft in drafts]
    plans = [each.plan(target) for draft in drafts for each in draft.alternatives(target.prefix_len)]
    plans.sort(key=lambda plan: (kinds.index(plan.config.kind), -plan.capacity))
    if len(set(kinds)) > 1 and (small := [plan for plan in plans if plan.gamma < 1]):
        what = "the draft's cache has no room for a verification block"
        refuse("draft_budget", small[0].capacity, "room for 2 tokens", what, f"use a larger {flag('draft_budget')}")
    if len(plans) > 1 and sum(Trait.SAVES_TEXTS in plan.config.traits for plan in plans) > 1:
        what, seen = "each of the drafts to choose among would save its n-grams", f"a file for {len(plans)} drafts"
        refuse("ngram_cache", seen, "a single draft that saves", what, "leave it out")
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
