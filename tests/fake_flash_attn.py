"""Stand-ins for the three flash packages: their interface, in plain PyTorch."""

from types import ModuleType

import torch
from torch import Tensor

from models.attention.flash_backend import FA2, Package


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool, window: tuple[int, int]) -> Tensor:
    """Return the output `[B, T, H, D]`; 0 for queries that see nothing."""
    n_row, n_slot, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if lengths is None:
        lengths = torch.full(q.shape[:1], n_slot)
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * q.shape[-1] ** -0.5
    slot, length = torch.arange(n_slot), lengths.long()[:, None, None]
    # Aligned to the bottom right: the last query is that of the last key.
    at = torch.arange(n_row)[:, None] + length - n_row
    left, right = window if not causal else (window[0], 0)
    visible = (slot < length) & ((slot >= at - left) | (left < 0)) & ((slot <= at + right) | (right < 0))
    scores = scores.masked_fill(~visible.expand(-1, n_row, -1)[:, None], float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1).nan_to_num(), v).to(q.dtype)


def fake_package(package: Package) -> ModuleType:
    """Return a module with the package's kernel, whose `calls` counts its calls."""
    module, is_fa2 = ModuleType(package.module), package.module == FA2.module

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens=None, cache_batch_idx=None, causal=False, window_size=(-1, -1), **more
    ):
        assert more.keys() <= ({"num_splits"} if is_fa2 else {"num_splits", "pack_gqa"}), more
        assert q.dtype in package.dtypes and k_cache.dtype == v_cache.dtype == q.dtype
        assert q.shape[3] % 8 == 0 and all(x.stride(-1) == 1 for x in (q, k_cache, v_cache))
        for index in (cache_seqlens, cache_batch_idx):
            assert index is None or index.dtype == torch.int32
        assert package.has_windows or not 0 <= window_size[0] < k_cache.shape[1] - 1, "no windows in this build"
        if cache_batch_idx is not None:
            k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        module.calls += 1
        return attention(q, k_cache, v_cache, cache_seqlens, causal, window_size)

    module.calls = 0
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module
