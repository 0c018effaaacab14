"""Stand-ins for the three flash packages: their documented interface and checks, in plain PyTorch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from models.attention.base import MAX_BLOCK

MOST_SPLITS = {"flash_attn": 128, "flash_attn_interface": 256, "fa3_fwd_interface": 256}


def require(condition: bool, message: str) -> None:
    """What the packages do with wrong arguments."""
    if not condition:
        raise RuntimeError(message)


def check_arguments(q, k_cache, v_cache, cache_seqlens, num_splits, dtypes, most_splits) -> None:
    require(q.dtype in dtypes, f"FlashAttention only supports {dtypes}")
    require(k_cache.dtype == q.dtype and v_cache.dtype == q.dtype, "query, key and value must have the same dtype")
    require(q.dim() == 4 and k_cache.dim() == 4 and v_cache.shape == k_cache.shape, "wrong number of dimensions")
    batch, n_row, n_head, head_dim = q.shape
    require(batch > 0 and n_row > 0, "nothing to do")
    require(k_cache.shape[0] == batch, "batch_size must be equal to batch_size_k")
    require(k_cache.shape[3] == head_dim, "query and key must have the same head dimension")
    require(n_head % k_cache.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    require(head_dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    require(head_dim % 8 == 0, "head_size should be a multiple of 8")
    for x in (q, k_cache, v_cache):
        require(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    if cache_seqlens is not None:
        require(cache_seqlens.dtype == torch.int32, "seqused_k must have dtype int32")
        require(cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous(), "seqused_k must be contiguous [B]")
    require(num_splits <= most_splits, f"num_splits > {most_splits} not supported")


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Output `[B, T, H, D]` and float32 log-sum-exp `[B, H, T]`; 0 and -inf for queries that see nothing."""
    n_row, n_slot, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if lengths is None:
        lengths = torch.full(q.shape[:1], n_slot)
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * q.shape[-1] ** -0.5
    slot = torch.arange(n_slot)
    length = lengths.long()[:, None, None]
    # Aligned to the bottom right: the last query is that of the last key.
    at = torch.arange(n_row)[:, None] + length - n_row
    left, right = window if not causal else (window[0], 0)
    visible = slot < length
    if left >= 0:
        visible = visible & (slot >= at - left)
    if right >= 0:
        visible = visible & (slot <= at + right)
    visible = visible.expand(-1, n_row, -1)[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return torch.einsum("bhts,bshd->bthd", weights, v).to(q.dtype), lse.float()


def fake_fa2(dtypes: tuple[torch.dtype, ...]) -> ModuleType:
    """`flash_attn`; `calls` is what its kernel was called with."""
    module = ModuleType("flash_attn")

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        check_arguments(q, k_cache, v_cache, cache_seqlens, num_splits, dtypes, MOST_SPLITS["flash_attn"])
        # Not an error there, but it reads a KV head once per query head; prefill is bound by arithmetic instead.
        packed = q.shape[2] == k_cache.shape[2] or q.shape[1] == 1
        assert packed or q.shape[1] > MAX_BLOCK, "a block whose query groups are not packed into rows"
        module.calls.append({"q": q.shape, "causal": causal, "window_size": window_size, "lengths": cache_seqlens})
        out, lse = attention(q, k_cache, v_cache, cache_seqlens, causal, window_size)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # its convention for queries that see nothing
        return (out, lse) if return_softmax_lse else out

    module.calls = []
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def fake_fa3(name: str, dtypes: tuple[torch.dtype, ...], has_windows: bool) -> ModuleType:
    """`flash_attn_interface` or `fa3_fwd_interface`; `calls` is what its kernel was called with."""
    module = ModuleType(name)

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        check_arguments(q, k_cache, v_cache, cache_seqlens, num_splits, dtypes, MOST_SPLITS[name])
        is_local = 0 <= window_size[0] < k_cache.shape[1] - 1
        require(has_windows or not is_local, "This flash attention build does not support local attention.")
        # fa3-fwd's kernel cannot be traced without it.
        require(num_splits > 0, f"tracing with num_splits <= 0 not supported. Got {num_splits=}")
        module.calls.append({"q": q.shape, "causal": causal, "num_splits": num_splits, "pack_gqa": pack_gqa})
        out, lse = attention(q, k_cache, v_cache, cache_seqlens, causal, window_size)
        return (out, lse, None, None) if return_softmax_lse else out

    module.calls = []
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module
