"""The reference backend: PyTorch's scaled_dot_product_attention with the query group packed into rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Beyond this many tokens a block is a prefill chunk: its mask is worth sharing among the group's heads.
MAX_PACKED_TOKENS = 16


def visibility(query_positions: Tensor, slot_positions: Tensor, sliding_window: int | None = None) -> Tensor:
    """Who sees what: bool `[B, T, C]`, true where `0 <= slot position <= query position`.

    A model trained with a sliding window (Mistral 7B v0.1) also forgets what lies `sliding_window`
    or more tokens back.
    """
    slots, queries = slot_positions[:, None, :], query_positions[:, :, None]
    visible = (slots >= 0) & (slots <= queries)
    if sliding_window is not None:
        visible &= slots > queries - sliding_window
    return visible


class TorchAttention:
    """Packs the G query heads of a KV head and the T tokens into one matmul: KV is read once, never expanded."""

    name = "torch"

    def prepare(
        self,
        query_positions: Tensor,
        slot_positions: Tensor,
        group_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """An additive mask, `[B, 1, G*T, C]` for packed blocks (group-major rows), `[B, 1, T, C]` for chunks."""
        visible = visibility(query_positions, slot_positions, sliding_window)
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        if query_positions.shape[1] <= MAX_PACKED_TOKENS:
            bias = bias.repeat(1, group_size, 1)
        return bias[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor) -> Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if q.shape[1] > MAX_PACKED_TOKENS:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=prepared, enable_gqa=True)
            return out.transpose(1, 2)
        batch, n_token, n_head, head_dim = q.shape
        n_kv_head = k.shape[1]
        group = n_head // n_kv_head
        packed = q.view(batch, n_token, n_kv_head, group, head_dim).permute(0, 2, 3, 1, 4)
        packed = packed.reshape(batch, n_kv_head, group * n_token, head_dim)
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=prepared)
        out = out.view(batch, n_kv_head, group, n_token, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, n_token, n_head, head_dim)
