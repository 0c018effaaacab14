"""DFlash: drafts a whole block in a single forward of a head over the target's hidden states (arXiv 2602.06036)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.base import check_most_drafts
from engine.drafters.head_drafter import HeadDrafter, HeadDrafterConfig
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import KVCache
from kv_cache.quantized import QuantizedKVCache
from models.heads.dflash import DFlashHead


class DFlash(HeadDrafter):
    """Drafts all tokens of a round by a DFlash head (see `DFlashHead`), whose block overwrites rejected entries.

    Given the text, each position draws from a distribution q_i that does not depend on the block's other drafts, so
    q(d_1, ..., d_gamma) is the product of q_i(d_i). Rejection needs q of each draft given the drafts before it: that is
    q_i, to which edits and grammars are applied as to other drafts. In a head with a `chain`, q_i depends on the draft
    before, too. Errors: ConfigError, also if a block drafts fewer tokens than gamma, and for layers with windows over a
    cache in 4 bits.
    """

    _head: DFlashHead
    _memory: Tensor | None

    def __init__(self, runner: ModelRunner, head: DFlashHead, cache: KVCache, gamma: int) -> None:
        check_most_drafts(gamma, head.shape.most_drafts)
        # Over such a cache backends go by lengths, where `SeenSlots` hides slots by their positions.
        if any(head.shape.windows) and isinstance(cache, QuantizedKVCache):
            what, where = "a cache in 4 bits cannot hide what is before a block's window", flag("draft_policy")
            raise ConfigError(what, where, "quantized", "entries that are not in 4 bits", f"use {where} streaming")
        super().__init__(runner, head, cache, gamma)

    def write(self, states: Tensor, following: Tensor, positions: Tensor, view: KVCache) -> None:
        self._head.remember(self.fused(states), positions, view)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        states, following, positions, _ = self.hidden_buffer.of_rows(batch)
        # The last round may have drafted more than this one.
        view = batch.view_of(self.cache, self.gamma)
        self.write(states, following, positions, view)
        if gamma == 0:
            return super().propose(batch, verification, gamma)
        block = batch.positions(gamma if self._head.shape.drafts_anchor else gamma + 1)
        return self.draw_all(self._head.draft(batch.current, block, view), batch, verification, gamma)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        if (chain := self._head.chain) is None:
            return super().logits(batch, i, tokens, cache)
        if not self._known.shape[-1]:  # a rank that has no part in the logits of a sharded target
            return self._known[:, i]
        memory = self._memory if i else None
        known, self._memory = chain(self._known[:, i], self._states[:, i], tokens, memory)
        return self._head.of_target(known)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadDrafterConfig):
    """A DFlash, DSpark or DFlash 2 head, which drafts a block at once from the target's hidden states."""

    name: ClassVar[str] = "dflash"
    DRAFTER: ClassVar[type[HeadDrafter]] = DFlash
