"""StandaloneDraft: drafts with a smaller model, over a cache that it fills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import ConfigError, flag, refuse
from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate
from engine.drafters.config import BuildInputs, Trait
from engine.drafters.model_drafter import CachedPlan, ModelDrafter, ModelDrafterConfig
from engine.drafters.stored import Models, PlannedTarget, Weights, largest_shard, weights_bytes
from engine.parallel.ranks import check_draft_ranks
from engine.remote_runner import RemoteRunner
from engine.runner import ModelRunner
from kv_cache import KVCache
from models.checkpoints.config_changes import ConfigChanges
from models.checkpoints.model_source import ModelSource, find_model
from models.tensor_parallel import check_count


class StandaloneDraft(ModelDrafter):
    """Drafts with a smaller model of the target's vocabulary (Leviathan et al. 2023, arXiv 2211.17192, section 2.1).

    A round starts by running the last *two* committed tokens of each row: the first of them is new to the cache where
    all drafts of the last round were accepted, and rewrites its entry elsewhere, so the step's shape never changes. A
    draft whose trained context is shorter than the text needs a streaming cache with `rotate_on_read`.

    The draft's vocabulary may be padded to another size than the target's. Ids that only the draft has are never
    proposed; in place of an id that only the target has, the draft runs its last id, which costs acceptance only.

    keeps_prompts: keep copies of the entries that each row's last prompt left, so that the prompt runs once while costs
    are measured. follows_parts: False over a cache that selects by a prompt's end. Errors: ConfigError if a round does
    not fit the window.
    """

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int, keeps_prompts: bool = False) -> None:
        super().__init__(runner, gamma)
        self.follows_parts = runner.cache is None or not runner.cache.selects
        self._vocab_size, self.keeps_prompts = runner.vocab_size, keeps_prompts
        self.kept: dict[int, tuple[list[int], list[Tensor]]] = {}

    def check(self, target: ModelRunner, length: int) -> None:
        super().check(target, length)
        if self._runner.ranks != target.ranks:
            where, fix = "StandaloneDraft: runner.ranks", "build both runners with the same ranks"
            raise ConfigError("draft and target run on other ranks", where, self._runner.ranks, target.ranks, fix)
        self._vocab_size = target.vocab_size

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        prompts, missed = {}, {}
        for row, _, text, n_seen, *_ in rows:
            begin = max(0, n_seen - 1)  # from the last seen token on: it may never have run (see `logits`)
            draft_ids = [*text[:begin], *(min(token, self._runner.vocab_size - 1) for token in text[begin:])]
            if n_seen:
                missed[row] = draft_ids, begin
            else:
                prompts[row] = draft_ids
        self._fill(prompts)
        self._runner.extend(missed)

    def _fill(self, prompts: dict[int, list[int]]) -> None:
        """Run the prompts, or restore the entries that they left in their rows."""
        missing = {row: prompt for row, prompt in prompts.items() if self.kept.get(row, ([],))[0] != prompt}
        self._runner.extend({row: (prompt, 0) for row, prompt in missing.items()})
        for row, prompt in prompts.items() if self.keeps_prompts else ():
            tensors = self._runner.cache.view(slice(row, row + 1)).tensors if self._runner.cache else []
            if row in missing:
                self.kept[row] = prompt, [x.clone() for x in tensors]
            else:
                for x, copy in zip(tensors, self.kept[row][1], strict=True):
                    x.copy_(copy)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        last, position = tokens[:, None], batch.lengths[:, None] + i
        if i == 0:
            last, position = torch.cat([batch.previous[:, None], last], 1), torch.cat([position - 1, position], 1)
        # A row that was never admitted idles at position 0, with nothing before it.
        logits = self._runner.last_logits(last.clamp(max=self._runner.vocab_size - 1), position.clamp(min=0), cache)
        # Over the target's ids: ids that only the draft has are cut, and an id that it lacks is impossible.
        return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=float("-inf"))


def drop_kept_prompts(drafters: Iterable[Drafter]) -> None:
    """Drop prompt states that were kept for measuring costs, of these drafters and of their parts."""
    for drafter in drafters:
        if isinstance(drafter, StandaloneDraft):
            drafter.keeps_prompts, drafter.kept = False, {}
        drop_kept_prompts(drafter.parts)


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(ModelDrafterConfig):
    """A smaller model."""

    name: ClassVar[str] = "standalone"
    TRAITS: ClassVar[Trait] = Trait.SECOND_MODEL
    draft_model: str
    draft_ranks: tuple[int, ...] | None = None

    def check(self) -> None:
        super().check()
        self.require_fixed()
        if self.policy.of_self_drafts:
            what, fix = f"{self.policy.name} chooses among the target's entries", f"use {flag('draft_policy')} snapkv"
            seen = f"{self.policy.name}, and a draft model with other entries"
            refuse("draft_policy", seen, "a self-draft, or another policy", what, fix)

    def plan(self, target: PlannedTarget, model: str = "draft_model", ranks: str = "draft_ranks") -> StandalonePlan:
        """Return the plan. model, ranks: the flags that name the checkpoint and its ranks, for messages."""

        def find(changes: ConfigChanges) -> ModelSource:
            return find_model(self.draft_model, target.load_format, None, flag(model), changes)

        facts = self.facts(target, find)
        source, group = facts["source"], check_draft_ranks(self.draft_ranks, target.group)
        check_count(source.config, len(group), flag(ranks))
        weights = Weights(source, self.dtype(target), self.scheme(target, source, len(group)))
        return StandalonePlan(group=group, weights=weights, **facts)


@dataclass(frozen=True, kw_only=True)
class StandalonePlan(CachedPlan):
    """A smaller model on ranks of its group; the others have a stand-in."""

    source: ModelSource

    def n_bytes(self, target: PlannedTarget, profiles: bool) -> tuple[dict[Weights, int], int]:
        cache = self.new_cache(largest_shard(self.source.config, self.group), 1, target.capacity, "meta")
        n_copies = 2 if profiles else 1  # entries of prompts are kept while costs are measured
        return {self.weights: weights_bytes(self.weights, self.group, target.device)}, n_copies * cache.n_bytes

    def load(self, models: Models) -> None:
        ranks = models.ranks_of(self.group)
        if self.weights in models.loaded or not ranks.holds:
            return
        models.loaded[self.weights] = model = models.planned.load(self.weights, ranks)
        self.say_weights()
        models.planned.prepare(model, self.kv_dtype, "the draft's attention")

    def make(self, inputs: BuildInputs) -> StandaloneDraft:
        target, model = inputs.runner, inputs.models.loaded.get(self.weights)
        runner: ModelRunner | RemoteRunner
        if model is None:
            holders = inputs.models.ranks_of(self.group)
            runner = RemoteRunner(self.source.config, self.weights.dtype, target.max_batch, target.ranks, holders)
        else:
            cache = self.new_cache(model.config, target.max_batch, inputs.length, target.device)
            runner = ModelRunner(model, cache, ranks=target.ranks)
        drafter = StandaloneDraft(runner, self.gamma, inputs.profiles)
        drafter.follows_parts = not self.policy.selects  # also on ranks without a cache
        return drafter
