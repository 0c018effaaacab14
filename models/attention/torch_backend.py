"""The reference backend: PyTorch's scaled_dot_product_attention over packed groups of query heads."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from kv_cache.entries import KV, SCORE_CHUNK
from models.attention.base import MAX_BLOCK, AnySlots, AttentionSpec


def visibility(query_positions: Tensor, slot_positions: Tensor, sliding_window: int | None = None) -> Tensor:
    """Return the slots that each query sees, bool `[B, T, C]`: true if `0 <= slot position <= query position`.

    A model that was trained with a `sliding_window` (Mistral 7B v0.1) sees only that many positions, the query's
    included.
    """
    slots, queries = slot_positions[:, None, :], query_positions[:, :, None]
    visible = (slots >= 0) & (slots <= queries)
    if sliding_window is not None:
        visible &= slots > queries - sliding_window
    return visible


class TorchAttention:
    """Attention with the G query heads of a KV head and the T tokens in a single product, so that KV is read once."""

    name = "torch"

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Tensor | CausalBias:
        """Return an additive mask: `[B, 1, G*T, C]` for blocks (group-major rows), `[B, 1, T, C]` for chunks.

        On CUDA, for a chunk at the end of its view, return a CausalBias: PyTorch's fused kernels need no tensor.
        """
        n_token, n_slot = queries.shape[1], slots.positions.shape[1]
        is_chunk = n_token > MAX_BLOCK
        if is_chunk and queries.is_cuda and slots.block_ends_view and spec.sliding_window is None:
            return causal_lower_right(n_token, n_slot)
        visible = visibility(queries, slots.positions, spec.sliding_window)
        bias = torch.zeros(visible.shape, dtype=spec.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        return bias[:, None] if is_chunk else bias.repeat(1, spec.group_size, 1)[:, None]

    def attend(self, q: Tensor, kv: KV, prepared: Tensor | CausalBias) -> Tensor:
        k, v = (x.transpose(1, 2) for x in kv.dequantized(q.dtype))
        if kv.chunk_scores is not None:
            fill_chunk_scores(q, k, prepared, kv)
        if q.shape[1] > MAX_BLOCK:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=prepared, enable_gqa=True)
            return out.transpose(1, 2)
        batch, n_token, n_head, head_dim = q.shape
        n_kv_head, group = k.shape[1], n_head // k.shape[1]
        packed = q.view(batch, n_token, n_kv_head, group, head_dim).permute(0, 2, 3, 1, 4)
        packed = packed.reshape(batch, n_kv_head, group * n_token, head_dim)
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=prepared)
        out = out.view(batch, n_kv_head, group, n_token, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, n_token, n_head, head_dim)


def fill_chunk_scores(q: Tensor, keys: Tensor, bias: Tensor | CausalBias, kv: KV) -> None:
    """Fill `kv.chunk_scores` by a separate product of `q [B, T, H, D]` with `keys [B, n_kv_head, C, D]`. bias: the mask
    of `TorchAttention.prepare`."""
    assert isinstance(bias, Tensor) and kv.chunk_scores is not None, "only short blocks are scored"
    (batch, n_token, _, head_dim), (n_kv_head, n_slot) = q.shape, keys.shape[1:3]
    grouped = q.unflatten(2, (n_kv_head, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ keys.mT).float() * head_dim**-0.5
    scores = scores.view(batch, n_kv_head, -1, n_token, n_slot) + bias[:, :, None, -n_token:].float()
    best = F.max_pool1d(scores.softmax(dim=-1).flatten(1, 3), SCORE_CHUNK, ceil_mode=True)
    shares = best.view(*scores.shape[:-1], -1)
    rows = torch.arange(batch, device=q.device) if kv.rows is None else kv.rows
    of_chunks = shares.mean(dim=2).transpose(1, 2).to(kv.chunk_scores.dtype)
    kv.chunk_scores[rows, :n_token, :, : shares.shape[-1]] = of_chunks
