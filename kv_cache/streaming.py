"""StreamingKVCache: attention sinks and a ring of recent tokens (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_cache.base import KVCache, KVShape
from kv_cache.errors import ConfigError


class StreamingKVCache(KVCache):
    """Keeps the first `n_sink` tokens and the last `budget - n_sink`; `budget` counts both.

    Keys keep the rotation of their absolute position. A position `p >= n_sink` takes the ring slot
    `n_sink + (p - n_sink) mod window`, so writing it evicts exactly the token `window` before it.
    Errors: ConfigError if the budget leaves no room for a window.
    """

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        budget: int,
        n_sink: int = 4,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_budget(budget, n_sink)
        super().__init__(config, max_batch, budget, device, dtype)
        self.n_sink = n_sink
        self.window = budget - n_sink

    @property
    def max_block(self) -> int:
        return self.window

    @property
    def max_length(self) -> None:
        return None

    def slots(self, positions: Tensor) -> Tensor:
        ring = self.n_sink + (positions - self.n_sink) % self.window
        return torch.where(positions < self.n_sink, positions, ring)

    def retained_positions(self, length: int) -> Tensor:
        sinks = torch.arange(min(self.n_sink, length))
        recent = torch.arange(max(self.n_sink, length - self.window), max(self.n_sink, length))
        return torch.cat([sinks, recent])


def check_budget(budget: int, n_sink: int) -> None:
    """Raise ConfigError unless the budget leaves room for a window behind the sinks."""
    if n_sink < 0 or budget < n_sink + 1:
        raise ConfigError(
            "the draft's KV budget has no room for a window behind its attention sinks",
            where="StreamingKVCache: budget (--streamingllm_budget) and n_sink (--n_sink)",
            seen=f"budget {budget}, n_sink {n_sink}",
            required="n_sink >= 0 and budget >= n_sink + 1",
            fix=f"raise the budget to {max(n_sink, 0) + 1} or more (256 is usual), or lower n_sink",
        )
