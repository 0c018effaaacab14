"""Tiny random heads that draft a block at once, plain code for what a DFlash head drafts, and drafters with heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine import ModelRunner
from engine.drafters.dflash import DFlash
from engine.drafters.eagle import Eagle
from engine.drafters.head_drafter import HeadDrafter
from kv_cache import KVCache
from kv_cache.base import KVShape
from models import ModelConfig
from models.heads.dflash import DFlashHead
from models.rope import rope_of
from tests.support.published_heads import random_dflash, random_eagle
from tests.support.tiny import normed, rotated

MASK = 2


def whole_dflash(target: KVShape, **options: Any) -> DFlashHead:
    """Return a DFlash head that borrows nothing, and has two of three of the target's ids."""
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 3 != 2])
    head = random_dflash(target, draft_vocab_size=len(ids), has_embedding=True, **options)
    head.target_ids = ids
    return head


HEADS: dict[str, tuple[type[HeadDrafter], Callable[..., Any]]] = {
    "eagle-1": (Eagle, partial(random_eagle, version=1)),
    "eagle-3": (Eagle, random_eagle),
    "P-EAGLE": (Eagle, partial(random_eagle, mask_token=MASK)),
    "dflash": (DFlash, random_dflash),
    "dflash, whole": (DFlash, whole_dflash),
}


def with_head(
    kind: str, runner: ModelRunner, new_cache: Callable[[ModelConfig], KVCache], gamma: int, **options: Any
) -> HeadDrafter:
    """Return a drafter with a head of one of HEADS. options: of the function that makes the head."""
    made, make = HEADS[kind]
    head = make(runner.model.config, **options).to(runner.device)
    return made(runner, head, new_cache(head.body.config), gamma)


def plain_block(head: DFlashHead, embedding: Tensor, fused: Tensor, current: int, n_draft: int) -> Tensor:
    """Return the normalised states `[n_draft, dim]` that draft after `current`, from the `fused [L, dim]` states of
    the text before it, without a cache."""
    shape, config, length = head.shape, head.body.config, len(fused)
    n_block = n_draft + (not shape.drafts_anchor)
    at = torch.arange(length + n_block)
    is_block, x = at >= length, embedding[torch.tensor([current] + [shape.mask_token] * (n_block - 1))]
    for layer, window in zip(head.body.layers, shape.windows or (None,) * config.n_layer, strict=True):
        attention, read = layer.attention, normed(x, layer.attention_norm.weight, config.norm_eps)
        q, k, v = (
            heads.unflatten(-1, (-1, config.head_dim))
            for heads in (torch.cat([fused, read]) @ attention.wqkv.weight.T).split(
                [config.head_dim * n for n in (config.n_head, config.n_kv_head, config.n_kv_head)], dim=-1
            )
        )
        q, k = (
            torch.stack(
                [rotated(heads, i, rope_of(config)) for i, heads in enumerate(normed(y, weight, config.norm_eps))]
            )
            for y, weight in zip((q, k), attention.qk_norm.weight.chunk(2), strict=True)
        )
        k, v = (y.repeat_interleave(config.n_head // config.n_kv_head, dim=1) for y in (k, v))
        attended = []
        for i in range(length, length + n_block):
            seen = torch.ones_like(is_block)
            if window:
                first = length - window if shape.is_anchored else i - window + 1
                seen = (at >= first) & (~is_block | (at <= i) | (not shape.is_causal))
            scores = torch.einsum("hd,khd->hk", q[i], k[seen]) / config.head_dim**0.5
            attended.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen]).flatten())
        x = x + torch.stack(attended) @ attention.wo.weight.T
        gate, up = (normed(x, layer.ffn_norm.weight, config.norm_eps) @ layer.feed_forward.w13.weight.T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.feed_forward.w2.weight.T
    return normed(x, head.body.norm.weight, config.norm_eps)[-n_draft:]
