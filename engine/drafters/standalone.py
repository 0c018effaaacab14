"""StandaloneDraft: a smaller model drafts, over a cache of its own that it fills itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.base import ModelDrafter, Shown
from engine.drafters.config import ModelDrafterConfig, Parts
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import KVCache
from models.checkpoints.model_source import ModelSource, find_model


class StandaloneDraft(ModelDrafter):
    """A smaller model with the target's vocabulary (Leviathan et al. 2023, arXiv 2211.17192, section 2.1).

    A round starts by running the last *two* committed tokens of each row: the first of them is new to the cache where
    all drafts of the last round were accepted, and is written over by itself elsewhere, so the step's shape never
    changes. A draft whose trained context is shorter than the text wants a streaming cache with `rotate_on_read`.

    The draft's vocabulary may be padded to another size than the target's. Ids that only the draft has are never
    proposed; one that only the target has is shown to the draft as its last id, which costs a draft its quality, and
    no emitted token anything. keeps_prompts: of each row, in a copy, what its last prompt left, which is run once then
    however often the row begins with it. follows_parts: not over a cache that selects its entries by a prompt's end.
    Errors: ConfigError if a round does not fit the window.
    """

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int, keeps_prompts: bool = False) -> None:
        super().__init__(runner, gamma)
        self.follows_parts = runner.cache is None or not runner.cache.selects
        self._vocab_size, self._keeps_prompts = runner.vocab_size, keeps_prompts
        self._kept: dict[int, tuple[list[int], list[Tensor]]] = {}

    def check(self, target: ModelRunner, length: int) -> None:
        super().check(target, length)
        if self._runner.ranks != target.ranks:
            where, fix = "StandaloneDraft: runner.ranks", "build both runners with the same ranks"
            raise ConfigError("draft and target run on other ranks", where, self._runner.ranks, target.ranks, fix)
        self._vocab_size = target.vocab_size

    def follow(self, rows: Sequence[Shown]) -> None:
        prompts, behind = {}, {}
        for row, _, text, known, *_ in rows:
            own_ids = [min(token, self._runner.vocab_size - 1) for token in text]
            if known:  # the last known token once more: it may never have been run (see `logits`)
                behind[row] = own_ids, known - 1
            else:
                prompts[row] = own_ids
        self._fill(prompts)
        self._runner.extend_rows(behind)

    def keep_no_prompts(self) -> None:
        self._keeps_prompts, self._kept = False, {}

    def _fill(self, prompts: dict[int, list[int]]) -> None:
        """Run the prompts, or put back what running them has left in their rows."""
        missing = {row: prompt for row, prompt in prompts.items() if self._kept.get(row, ([],))[0] != prompt}
        self._runner.fill_rows(missing)
        for row, prompt in prompts.items() if self._keeps_prompts else ():
            held = self._runner.cache.view(slice(row, row + 1)).tensors if self._runner.cache else []
            if row in missing:
                self._kept[row] = prompt, [x.clone() for x in held]
            else:
                for x, copy in zip(held, self._kept[row][1], strict=True):
                    x.copy_(copy)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        last, position = tokens[:, None], batch.lengths[:, None] + i
        if i == 0:
            last, position = torch.cat([batch.previous[:, None], last], 1), torch.cat([position - 1, position], 1)
        # A row that was never admitted idles at position 0, with nothing before it.
        logits = self._runner.last_logits(last.clamp(max=self._runner.vocab_size - 1), position.clamp(min=0), cache)
        # Over the target's ids: those that only the draft has are cut, one that it lacks is impossible.
        return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=float("-inf"))


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(ModelDrafterConfig):
    """A smaller model."""

    name: ClassVar[str] = "standalone"
    draft_model: str
    """the draft's converted checkpoint"""
    draft_ranks: tuple[int, ...] | None = None
    """ranks that share the draft (default: those of --rank_group)"""

    def check(self) -> None:
        super().check()
        if self.policy.of_self_drafts:
            what, where = f"{self.policy.name} chooses among the target's entries", flag("draft_policy")
            seen = f"{self.policy.name}, and a draft model with entries of its own"
            raise ConfigError(what, where, seen, "a self-draft, or another policy", f"use {where} snapkv")

    def find_source(self, target: ModelSource, load_format: str, verify: bool) -> ModelSource:
        return find_model(self.draft_model, load_format, None, flag("draft_model"), verify)

    def build(self, parts: Parts) -> StandaloneDraft:
        own: ModelRunner | RemoteRunner = (
            parts.remote()
            if parts.model is None
            else ModelRunner(parts.model, parts.new_cache(parts.model.config), ranks=parts.runner.ranks)
        )
        drafter = StandaloneDraft(own, parts.gamma, parts.rehearses)
        drafter.follows_parts = not self.policy.selects  # also on ranks without a cache
        return drafter
