"""Training forwards of heads over windows: EAGLE unrolled over draft positions, DFlash with many blocks over a text."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_cache.entries import KV, Store, store
from kv_cache.views import NoCache
from models.attention import AttentionSpec, TorchAttention
from models.attention.base import AnySlots
from models.heads.dflash import DFlashHead
from models.heads.eagle import EagleHead
from reproduce.heads.examples import N_SINK


class Masked(NoCache, TorchAttention):
    """Cache and attention of a head's layers in training: a subclass says which entries a forward reads and sees."""

    in_order = block_ends_view = False

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self._written: list[Tensor] = []

    def attend(self, q: Tensor, kv: KV, prepared: Tensor) -> Tensor:
        k, v = (x.transpose(1, 2) for x in (kv.keys, kv.values))
        queries = q.view(len(k), -1, *q.shape[2:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=prepared, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)


class Unrolled(Masked):
    """A one-layer head that is run from the states that it predicts, step by step. Row i of the first step sees rows 0
    to i. In later steps it also sees its entries of the steps before, like in drafting (training-time test, EAGLE-3,
    arXiv 2503.01840, section 3.2)."""

    def write(self, layer: int, slots: None, new: Tensor, store: Store = store) -> None:
        self._written.append(new)

    def read(self, layer: int, queries: Tensor) -> KV:
        return KV(*torch.cat(self._written, dim=1).unbind(2))

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Tensor:
        itself = torch.eye(queries.shape[1], dtype=torch.bool, device=queries.device)
        return torch.cat([torch.ones_like(itself).tril(), *[itself] * len(self._written)], dim=1)


class BlocksBehindText(Masked):
    """Blocks at `anchors [B, n]`, indices in the texts of a batch. It first takes a text's entries, `[B, T, ...]`, then
    those of blocks, `[B * n, size, ...]`, of which each sees the text before it and itself."""

    def __init__(self, positions: Tensor, anchors: Tensor) -> None:
        super().__init__(positions)
        self._anchors = anchors

    def write(self, layer: int, slots: None, new: Tensor, store: Store = store) -> None:
        if layer == len(self._written):
            self._written.append(new)
        else:
            text = self._written[layer]
            self._new = torch.cat([text, new.view(len(text), -1, *new.shape[2:])], dim=1)

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Tensor:
        size, n = queries.shape[1], self._anchors.shape[1]
        at = torch.arange(self.positions.shape[1], device=queries.device)
        text = at < self._anchors.repeat_interleave(size, dim=1)[..., None]
        block = torch.arange(n * size, device=queries.device) // size
        return torch.cat([text, (block[:, None] == block).expand(len(text), -1, -1)], dim=2)[:, None]


def eagle_logits(eagle: EagleHead, batch: Mapping[str, Tensor], depth: int) -> tuple[Tensor, Tensor]:
    """Return the head's logits at `depth` draft positions after each token of the windows, `[depth, N,
    draft_vocab_size]`, and the token of the batch, `[depth, N]`, whose state gives the target's distribution there.

    batch: windows of `examples.stacked`, with states in float32."""
    n_window, width = batch["tokens"].shape
    length = width - depth
    states, positions = eagle.fused(batch["inputs"][:, :length]), batch["positions"][:, :length]
    eagle.body.backend = unrolled = Unrolled(positions)
    index = torch.arange(n_window * width, device=states.device).view(n_window, width)
    logits, state_of = [], []
    for i in range(depth):
        # The next tokens after sinks are right in the first step, the only one whose entries other tokens see.
        states = eagle.advance(states, batch["next"][:, i : i + length], positions + i, unrolled)
        logits.append(eagle.draft_logits(states[:, N_SINK:]).flatten(0, 1))
        state_of.append(index[:, N_SINK + 1 + i : 1 + i + length].flatten())
    return torch.stack(logits), torch.stack(state_of)


def dflash_logits(
    dflash: DFlashHead, batch: Mapping[str, Tensor], size: int, n_blocks: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the head's logits at the draft positions of `n_blocks` random blocks of `size` tokens in each window,
    `[size, N, draft_vocab_size]`, and the token of the batch, `[size, N]`, whose state gives the target's distribution
    there. A head that does not draft at its current token has a position less."""
    n_window, width = batch["tokens"].shape
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(N_SINK, width - size + 1, (n_window, n_blocks), generator=generator)
    anchors = anchors.to(batch["tokens"].device)
    ahead = torch.arange(size, device=anchors.device)
    positions = (batch["positions"].gather(1, anchors)[..., None] + ahead).flatten(0, 1)
    dflash.body.backend = cache = BlocksBehindText(batch["positions"], anchors)
    dflash.remember(dflash.fused(batch["inputs"]), batch["positions"], cache)
    states = dflash.draft(batch["tokens"].gather(1, anchors).flatten(), positions, cache)
    logits = dflash.draft_logits(states).transpose(0, 1)
    first = anchors + width * torch.arange(n_window, device=anchors.device)[:, None]
    return logits, first.flatten() + ahead[: len(logits), None]
