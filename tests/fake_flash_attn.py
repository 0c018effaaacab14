"""Stand-ins for the three flash packages: their documented interface and checks, in plain PyTorch."""

from types import ModuleType

import torch
from torch import Tensor

from models.attention.base import MAX_BLOCK
from models.attention.flash_backend import FA2, Package

MOST_SPLITS = {"flash_attn": 128, "flash_attn_interface": 256, "fa3_fwd_interface": 256}


def require(condition: bool, message: str) -> None:
    """Raise RuntimeError, as the packages do for wrong arguments."""
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


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool, window: tuple[int, int]) -> Tensor:
    """Output `[B, T, H, D]`; 0 for queries that see nothing."""
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
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1).nan_to_num(), v).to(q.dtype)


def fake_package(package: Package) -> ModuleType:
    """A module with the package's kernel; `calls` is what it was called with."""
    module, is_fa2 = ModuleType(package.module), package.module == FA2.module

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens=None,
        cache_batch_idx=None,
        causal=False,
        window_size=(-1, -1),
        num_splits=0,
        **only_of_fa3,
    ):
        assert only_of_fa3.keys() <= (set() if is_fa2 else {"pack_gqa"}), "no such argument, or none that is used"
        if cache_batch_idx is not None:
            require(cache_batch_idx.dtype == torch.int32, "cache_batch_idx must have dtype int32")
            k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        check_arguments(q, k_cache, v_cache, cache_seqlens, num_splits, package.dtypes, MOST_SPLITS[package.module])
        if is_fa2:
            # Not an error there, but it reads a KV head once per query head; prefill is bound by arithmetic instead.
            packed = q.shape[2] == k_cache.shape[2] or q.shape[1] == 1
            assert packed or q.shape[1] > MAX_BLOCK, "a block whose query groups are not packed into rows"
        else:
            is_local = 0 <= window_size[0] < k_cache.shape[1] - 1
            message = "This flash attention build does not support local attention."
            require(package.has_windows or not is_local, message)
            # fa3-fwd's kernel cannot be traced without it.
            require(num_splits > 0, f"tracing with num_splits <= 0 not supported. Got {num_splits=}")
        call = {"q": q.shape, "causal": causal, "lengths": cache_seqlens, "num_splits": num_splits}
        module.calls.append(call | only_of_fa3)
        return attention(q, k_cache, v_cache, cache_seqlens, causal, window_size)

    module.calls = []
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module
