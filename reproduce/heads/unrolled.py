"""A head's losses on text whose states are known, with its own states in their place after the first step."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_cache.entries import KV
from kv_cache.over import BlockAlone, Slots
from models.attention import AttentionSpec, TorchAttention
from models.heads.eagle import EagleHead
from models.heads.medusa import MedusaHeads


class Unrolled(BlockAlone, TorchAttention):
    """Cache and attention of a one-layer head that goes on from its own states, step by step: row i of the first step
    sees the first i rows and itself, in later ones beside those its own entries of the steps before, as when drafting
    (training-time test, EAGLE-3, arXiv 2503.01840, section 3.2)."""

    in_order = block_ends_view = False

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self._written: list[Tensor] = []

    def write(self, layer: int, slots: None, new: Tensor) -> None:
        self._written.append(new)

    def read(self, layer: int, queries: Tensor) -> KV:
        return KV(*torch.cat(self._written, dim=1).unbind(2))

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Tensor:
        n = queries.shape[1]
        own = torch.eye(n, dtype=torch.bool, device=queries.device)
        visible = torch.cat([torch.ones_like(own).tril(), *[own] * len(self._written)], dim=1)
        return torch.zeros_like(visible, dtype=spec.dtype).masked_fill(~visible, -torch.inf)[None, None]


def unrolled_losses(
    eagle: EagleHead, medusa: MedusaHeads, known_rows: Tensor, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of each head at each of the draft positions, `[2, depth]`, EAGLE's first: the cross entropy against the target's
    distribution over the tokens that drafts may be, and what of it the head shares, sum(min(p, q)).

    known_rows: the target's output layer for those tokens, `[n, dim]`. batch: as `Examples`, the states in float32. The
    i-th draft behind position t follows the token at t + 1 + i, and the target's state there says what it should be."""
    depth, length = len(medusa), batch["tokens"].shape[1] - len(medusa)
    laws = F.linear(batch["last"], known_rows).softmax(dim=-1)
    states, last = eagle.fused(batch["inputs"][:, :length]), batch["last"][:, :length]
    positions = torch.arange(length, device=last.device).expand(last.shape[:2])
    eagle.body.backend = unrolled = Unrolled(positions)
    losses, shared = [], []
    for i in range(depth):
        ahead = slice(1 + i, 1 + i + length)
        states = eagle.advance(states, batch["tokens"][:, ahead], positions + i, unrolled)
        for logits in (eagle.draft_logits(states), F.linear(medusa[i](last), known_rows)):
            law = laws[:, ahead]
            losses.append(F.cross_entropy(logits.flatten(0, 1), law.flatten(0, 1)))
            shared.append(torch.minimum(logits.detach().softmax(dim=-1), law).sum(dim=-1).mean())
    return tuple(torch.stack(each).view(depth, 2).T for each in (losses, shared))
