"""StandaloneDraft: a smaller model drafts, over a cache of its own that it fills itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.batch import Batch
from engine.drafters.base import check_cache, check_gamma, draw_drafts
from engine.drafters.config import ModelDrafterConfig, Parts
from engine.modes import Drafts, Verification

if TYPE_CHECKING:
    from engine.runner import ModelRunner, RemoteRunner


class StandaloneDraft:
    """A smaller model with the target's vocabulary (Leviathan et al. 2023, arXiv 2211.17192, section 2.1).

    A round starts by running the last *two* committed tokens of each row: the first of them is new to the cache where
    all drafts of the last round were accepted, and is written over by itself elsewhere, so the step's shape never
    changes. A draft whose trained context is shorter than the text wants a streaming cache with `rotate_on_read`.

    The draft's vocabulary may be padded to another size than the target's. Ids that only the draft has are never
    proposed; one that only the target has is shown to the draft as its last id, which costs a draft its quality, and
    no emitted token anything. Errors: ConfigError if gamma is negative or a round does not fit the cache's window.
    """

    verification_cache = None

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int) -> None:
        check_gamma(gamma, gamma + 1 if runner.cache is None else runner.cache.max_block)
        self.gamma, self._runner, self._vocab_size = gamma, runner, runner.vocab_size

    def check(self, target: ModelRunner, length: int) -> None:
        check_cache(self, self._runner, target, length)
        if self._runner.ranks != target.ranks:
            where, fix = "StandaloneDraft: runner.ranks", "build both runners with the same ranks"
            raise ConfigError("draft and target run on other ranks", where, self._runner.ranks, target.ranks, fix)
        self._vocab_size = target.vocab_size

    def follow(self, row: int, request: int, text: Sequence[int], known: int) -> None:
        own_ids = [min(token, self._runner.vocab_size - 1) for token in text]
        if known == 0:
            self._runner.fill_row(row, own_ids)
        else:  # the last known token once more: it may never have been run (see `propose`)
            self._runner.extend_row(row, own_ids, known - 1)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        lengths, runner = batch.lengths, self._runner
        cache = None if runner.cache is None else runner.cache.view(extent=batch.extent(gamma))

        def step(i: int, tokens: Tensor) -> Tensor:
            last, position = tokens[:, None], lengths[:, None] + i
            if i == 0:
                last, position = torch.cat([batch.previous[:, None], last], 1), torch.cat([position - 1, position], 1)
            # A row that was never admitted idles at position 0, with nothing before it.
            logits = runner.last_logits(last.clamp(max=runner.vocab_size - 1), position.clamp(min=0), cache)
            # Over the target's ids: those that only the draft has are cut, one that it lacks is impossible.
            return F.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=float("-inf"))

        return draw_drafts(gamma, batch.current, step, verification, runner.ranks)

    def rollback(self, lengths: Tensor) -> None:
        self._runner.rollback(lengths)


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(ModelDrafterConfig):
    """A smaller model."""

    name: ClassVar[str] = "standalone"
    draft_model: str
    """the draft's converted checkpoint"""
    draft_ranks: tuple[int, ...] | None = None
    """ranks that share the draft (default: those of --rank_group)"""

    def build(self, parts: Parts) -> StandaloneDraft:
        from engine.runner import ModelRunner

        if parts.model is None:
            return StandaloneDraft(parts.remote(), parts.gamma)
        cache = parts.new_cache(parts.model.config)
        return StandaloneDraft(ModelRunner(parts.model, cache, ranks=parts.runner.ranks), parts.gamma)
