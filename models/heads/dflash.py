"""DFlash heads: a few layers that draft a whole block in one forward (arXiv 2602.06036)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kv_cache.views import SeenSlots, Slots
from models.heads.base import HeadShape, TransformerHead
from models.llama import Block, Linear


@dataclass(frozen=True)
class DFlashShape(HeadShape):
    """The shape of a DFlash head, whose `mask_token` is set.

    block_size: tokens of a block in training: the current token, and masks behind it.
    drafts_anchor: the state at the current token drafts, too, so that a block needs a mask less
        (`sample_from_anchor`).
    is_causal: in layers with a window, a token of the block sees no later token.
    is_anchored: in layers with a window, every token of the block sees the last `window` tokens before the block,
        beside the block; else it sees `window` tokens up to itself.
    """

    block_size: int = 16
    drafts_anchor: bool = False
    is_causal: bool = True
    is_anchored: bool = True

    @property
    def most_drafts(self) -> int:
        """The most tokens that a block drafts."""
        return self.block_size - (not self.drafts_anchor)


class DFlashHead(TransformerHead):
    """A head whose layers read the text as keys and values made of the target's states, and draft at mask tokens.

    `fused` turns the target's states into the head's, `remember` writes their entries, and `draft` runs a block behind
    them: every token sees the text before the block and the whole block, also what is behind it.
    """

    shape: DFlashShape

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        config = shape.config
        self.fc = Linear(shape.state_dim, config.dim, bias=False)
        self.hidden_norm = nn.RMSNorm(config.dim, config.norm_eps)

    def fused(self, states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(states))

    def remember(self, fused: Tensor, positions: Tensor, cache: Slots) -> None:
        """Write every layer's entries of the text's tokens at `positions [B, T]`. fused: `[B, T, dim]`."""
        step = self.body.begin(positions, cache, fused.dtype, see=lambda *_: ())
        for index, layer in enumerate(self.body.layers):
            assert isinstance(layer, Block)
            layer.attention.write(fused.flatten(0, 1), step, index)

    def draft(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """Run a block of the current `tokens [B]` and masks at `positions [B, T]`, ascending by 1.

        The cache has the entries of the text before the block; those of the block are written behind them. Returns the
        normalised states `[B, n, dim]` that draft: n is T, or T - 1 without `drafts_anchor`.
        """
        assert self.shape.mask_token is not None
        block = torch.full_like(positions, self.shape.mask_token)
        block[:, 0] = tokens
        x = self.embed(block, self.hidden_norm.weight.dtype)
        step = self.body.begin(positions, cache, x.dtype, see=self._see_block)
        x, update, _ = self.body.run(x, torch.zeros_like(x), step)
        hidden = self.body.norm(x + update).view(*positions.shape, -1)
        return hidden if self.shape.drafts_anchor else hidden[:, 1:]

    def _see_block(self, positions: Tensor, cache: Slots, dtype: torch.dtype) -> Sequence[Any]:
        """Prepare attention of a block for each layer: by positions, since the block is not causal."""
        shape, whole = self.shape, positions[:, -1:].expand_as(positions)

        def prepared(window: int | None) -> Any:
            slots, newest = cache.positions, positions if window and shape.is_causal else whole
            if window and shape.is_anchored:
                slots, window = slots.masked_fill(slots < positions[:, :1] - window, -1), None
            return self.prepared(window, newest, SeenSlots(slots, cache.rows), dtype)

        return self.by_window(prepared)
