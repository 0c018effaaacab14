"""Eagle: drafts with a few layers that continue the target's hidden states, over another cache."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.batch import Batch
from engine.drafters.base import check_gamma
from engine.drafters.head_drafter import HeadDrafter, HeadDrafterConfig
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import KVCache
from models.heads.eagle import EagleHead


class Eagle(HeadDrafter):
    """Drafts a chain of tokens by an EAGLE-1, -2 or -3 head, or all at once by a P-EAGLE head (see `EagleHead`).

    The entry at position p is that of the target's state at p and the token after it.
    """

    _head: EagleHead

    def __init__(self, runner: ModelRunner, head: EagleHead, cache: KVCache, gamma: int) -> None:
        super().__init__(runner, head, cache, gamma)
        if head.mask_hidden is not None:
            check_gamma(gamma, cache.max_block, block=2 * gamma)

    def write(self, states: Tensor, following: Tensor, positions: Tensor, view: KVCache) -> Tensor:
        return self._head.advance(self.fused(states), following, positions, view)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        states, following, positions, last = self.hidden_buffer.of_rows(batch)
        # The last round may have drafted more than this one.
        view = batch.view_of(self.cache, self.gamma)
        if self._head.mask_hidden is not None:
            drafting = self._run_masks(states, following, positions, last, view, max(1, gamma))
            return self.draw_all(drafting, batch, verification, gamma)
        after = self.write(states, following, positions, view)
        self._state = after.take_along_dim(last[..., None], dim=1)
        return super().propose(batch, verification, gamma)

    def _run_masks(
        self, states: Tensor, following: Tensor, positions: Tensor, last: Tensor, view: KVCache, n_draft: int
    ) -> Tensor:
        """Run the accepted states and `n_draft - 1` masks after them; return the states `[B, n_draft, dim]` that
        draft. Shapes never change: shorter rows repeat their last token, whose entry is then written again."""
        mask, token = self._head.mask_hidden, self._head.shape.mask_token
        assert mask is not None and token is not None
        columns, drafts = (torch.arange(n, device=last.device) for n in (self.gamma + n_draft, n_draft))
        index = torch.minimum(columns, last + n_draft - 1)
        is_mask, seen = index > last, torch.minimum(index, last)
        states = torch.where(is_mask[..., None], mask, states.to(mask.dtype).take_along_dim(seen[..., None], dim=1))
        tokens = following.gather(1, seen).masked_fill(is_mask, token)
        view.in_order = False  # positions repeat, so backends have to go by them
        after = self.write(states, tokens, positions[:, :1] + index, view)
        return after.take_along_dim((last + drafts)[..., None], dim=1)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        if self._head.mask_hidden is not None:
            return super().logits(batch, i, tokens, cache)
        if i > 0 and cache is not None:
            position = batch.lengths[:, None] - 1 + i
            self._state = self._head.advance(self._state, tokens[:, None], position, cache)
        return self._head.logits(self._state[:, 0])


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadDrafterConfig):
    """An EAGLE head, which goes on from the target's hidden states."""

    name: ClassVar[str] = "eagle"
    DRAFTER: ClassVar[type[HeadDrafter]] = Eagle
