"""The matrix of KV policies that the shared tests run over: one row per policy, and one that runs for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_cache import (
    FullKVCache,
    KVCache,
    QuantizedKVCache,
    Retrieval,
    SnapKV,
    StreamingKVCache,
    VerifyTopK,
)
from kv_cache.base import KVShape


@dataclass(frozen=True)
class Size:
    """What a draft's cache is made for: rows, the longest text, blocks of gamma + 1 tokens, and a budget with room
    for `n_kept` entries beside a window of `window >= gamma + 1` tokens.
    """

    n_rows: int
    longest: int
    n_kept: int
    window: int
    dtype: torch.dtype

    @property
    def budget(self) -> int:
        return self.n_kept + self.window


@dataclass(frozen=True)
class Policy:
    """make: an empty cache of that size. by_attention: whether it selects by queries, which a model has to have.
    is_exact: whether it holds entries as they are."""

    make: Callable[[KVShape, Size], KVCache]
    by_attention: bool = False
    is_exact: bool = True


def new_cache(policy: SnapKV, config: KVShape, size: Size) -> KVCache:
    return policy.new_cache(config, size.n_rows, size.longest, "cpu", size.dtype)


POLICIES = {
    "streaming": Policy(
        lambda config, size: StreamingKVCache(config, size.n_rows, size.budget, size.n_kept, dtype=size.dtype)
    ),
    "full": Policy(lambda config, size: FullKVCache(config, size.n_rows, size.longest, dtype=size.dtype)),
    "streaming, positions in the cache": Policy(
        lambda config, size: StreamingKVCache(
            config, size.n_rows, size.budget, size.n_kept, dtype=size.dtype, rotate_on_read=True
        )
    ),
    "snapkv": Policy(
        lambda config, size: new_cache(SnapKV(size.budget + 1, size.window), config, size),
        by_attention=True,
    ),
    "verify_topk": Policy(
        lambda config, size: new_cache(VerifyTopK(size.budget + 1, size.window, n_sink=0), config, size),
        by_attention=True,
    ),
    "retrieval": Policy(
        lambda config, size: new_cache(
            Retrieval(size.budget + 1, size.window, n_sink=0, refresh=2, chunk=min(3, size.window)), config, size
        ),
        by_attention=True,
    ),
    "quantized": Policy(
        lambda config, size: QuantizedKVCache(
            config, size.n_rows, size.longest, group=size.window, window=size.window, dtype=size.dtype
        ),
        is_exact=False,
    ),
}
# A self-draft copies the target's keys, which are rotated already.
OF_SELF_DRAFTS = tuple(name for name in POLICIES if "positions" not in name)
BY_POSITION = tuple(name for name in OF_SELF_DRAFTS if not POLICIES[name].by_attention and POLICIES[name].is_exact)
