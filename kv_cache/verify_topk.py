"""VerifyTopKCache: what verification itself attended to most, chosen anew every few rounds (Vegas, PillarAttn)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch

from common.errors import ConfigError, flag, require_at_least
from kv_cache.base import Device, KVCache, KVShape
from kv_cache.entries import KV, dequantize, stored_as
from kv_cache.over import BlockQueries
from kv_cache.snapkv import SnapKV, SnapKVCache, attention_received

# Of queries `[B, n, n_head, D]` that see one layer's entries up to positions `[B, n]`, the attention that each entry
# gets of one of them, on average: `[B, n_kv_head, C]` float32.
Receive: TypeAlias = "Callable[[torch.Tensor, KV, torch.Tensor], torch.Tensor]"


def received(queries: torch.Tensor, kv: KV, newest: torch.Tensor) -> torch.Tensor:
    """`attention_received` of a batch, whose entries lie in the order of their positions."""
    rows = slice(None) if kv.rows is None else kv.rows
    scales = None if kv.key_scales is None else kv.key_scales[rows]
    keys = dequantize(kv.keys[rows], scales, queries.dtype).transpose(1, 2)
    return attention_received(queries.transpose(1, 2), keys, newest) / newest.shape[1]


class VerifyTopKCache(SnapKVCache):
    """As SnapKVCache behind a prompt; after every `refresh` rounds a self-draft's entries are chosen anew.

    Each layer and KV head keeps the text's first `n_first` tokens, its last `window`, and of the others those that
    queries of the last verification attend to most (Vegas, arXiv 2602.07223; PillarAttn, arXiv 2512.01278): of its
    first and of its last token that stands ("ends"), or of every token ("all"), the last that stands in place of
    rejected ones. Errors: ConfigError as of SnapKVCache, or if `refresh` or `n_first` is too small.
    """

    def __init__(
        self,
        config: KVShape,
        max_batch: int,
        budget: int,
        window: int = 32,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        n_first: int = 4,
        refresh: int = 4,
        score_queries: Literal["ends", "all"] = "ends",
    ) -> None:
        check_topk(budget, window, n_first, refresh)
        super().__init__(config, max_batch, budget, window, device, dtype)
        self.n_first, self._refresh, self.score_queries = n_first, refresh, score_queries

    @property
    def refresh(self) -> int:
        return self._refresh

    def choose(
        self,
        source: KVCache,
        lengths: torch.Tensor,
        block: BlockQueries,
        layers: Sequence[int] | None = None,
        receive: Receive = received,
    ) -> None:
        """Choose from `source`, whose rows hold `lengths [B]` tokens in order, by what they verified last.

        layers: as of `fill_row`. receive: as `received`. Rows stay as they are that verified nothing since they were
        filled, or whose whole text the cache holds.
        """
        if source.keys.shape[3] <= self.capacity:
            return
        rows, n_chosen = self.row_indices, self.n_sink
        starts = block.starts[rows]
        n_standing = (lengths - starts)[:, None]
        is_new = (n_standing[:, 0] > 0) & (lengths > self.capacity)
        most = block.queries.shape[2]
        which = torch.arange(most, device=self.device)[:: max(1, most - 1) if self.score_queries == "ends" else 1]
        which = torch.minimum(which, n_standing - 1).clamp(min=0)
        slots = torch.arange(source.keys.shape[3], device=self.device)
        is_recent = slots >= (lengths - self.window)[:, None, None]
        for to_layer, from_layer in enumerate(range(len(self.entries)) if layers is None else layers):
            kv = source.read(from_layer)
            queries = block.queries[to_layer][rows[:, None], which]
            share = receive(queries, kv, starts[:, None] + which)
            share[..., : self.n_first].fill_(float("inf"))
            chosen = share.masked_fill_(is_recent, -1).topk(n_chosen, sorted=False).indices
            self.replace_chosen(to_layer, source, from_layer, chosen, is_new)

    def replace_chosen(
        self, to_layer: int, source: KVCache, from_layer: int, chosen: torch.Tensor, is_new: torch.Tensor
    ) -> None:
        """Put one layer's entries of `source` at positions `chosen [B, n_kv_head, n_sink]` in place of those chosen
        before, in the rows that `is_new [B]` says."""
        own_rows = slice(None) if self.rows is None else self.rows
        found = stored_as(*source.gather(from_layer, chosen), self.entries.dtype)
        for own, new in zip((self.entries, self.scales), found, strict=True):
            if own is not None and new is not None:
                is_written = is_new.view(-1, *[1] * (new.dim() - 2))
                held = own[to_layer][:, own_rows, :, : self.n_sink]
                own[to_layer][:, own_rows, :, : self.n_sink] = torch.where(is_written, new, held)


def check_topk(budget: int, window: int, n_first: int, refresh: int) -> None:
    """Raise ConfigError unless something is chosen beside the window and the first tokens, and now and then anew."""
    require_at_least("refresh", refresh, 1)
    if n_first < 0 or budget - window <= n_first:
        what = "the draft's KV budget has no room for chosen entries beside its sinks and its window"
        where = f"{flag('draft_budget')}, {flag('n_sink')} and {flag('snapkv_window')}"
        seen, required = f"budget {budget}, n_sink {n_first}, window {window}", "n_sink >= 0 and < budget - window"
        raise ConfigError(what, where, seen, required, "raise the budget, or lower the others")


@dataclass(frozen=True)
class VerifyTopK(SnapKV):
    """Sinks, recent tokens, and what verification attends to most, of a self-draft."""

    name: ClassVar[str] = "verify_topk"
    of_self_drafts: ClassVar[bool] = True
    n_sink: int = 4
    """attention sinks in the budget"""
    refresh: int = 4
    """rounds after which entries are chosen anew"""
    score_queries: Literal["ends", "all"] = "ends"
    """by which queries of a verification: its first and last token's that stand, or all"""

    def check(self) -> None:
        super().check()
        check_topk(self.budget, self.snapkv_window, self.n_sink, self.refresh)

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        own = self.budget, self.snapkv_window, device, dtype, self.n_sink, self.refresh, self.score_queries
        return VerifyTopKCache(config, max_batch, *own)
