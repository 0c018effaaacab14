"""RefreshedKVCache: a self-draft's entries, selected anew every few rounds by the target's verifications."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import EMPTY, Device, KVCache, KVShape
from kv_cache.entries import KV, SCORE_CHUNK, stored_as
from kv_cache.scored import ScoredKVCache
from kv_cache.snapkv import SnapKV
from kv_cache.views import WriteThroughKVCache


class VerificationScores:
    """Records of each row's last verification, which a cache selects its entries by.

    starts: the position of the block's first token, `[max_batch]` int64; larger than any length if there was no block.
    seen: the block's queries, `[n_layer, max_batch, n_token, n_head, head_dim]`; with `as_shares`, each layer's
    `KV.chunk_scores`, `[n_layer, max_batch, n_token, n_kv_head, capacity / SCORE_CHUNK]`. A shorter block fills the
    first tokens.
    """

    def __init__(self, shape: Sequence[int], device: Device, dtype: torch.dtype, as_shares: bool) -> None:
        self.starts = torch.empty(shape[1], device=device, dtype=torch.int64)
        self.seen, self.as_shares = torch.empty(*shape, device=device, dtype=dtype), as_shares
        self.forget()

    def forget(self, row: int | slice = slice(None)) -> None:
        self.starts[row], self.seen[:, row] = torch.iinfo(torch.int64).max, 0

    @property
    def n_bytes(self) -> int:
        return self.starts.nbytes + self.seen.nbytes


class ObservingKVCache(WriteThroughKVCache):
    """A write-through view that records in the draft cache's `scores` what this cache selects its entries by."""

    def __init__(self, through: WriteThroughKVCache) -> None:
        super().__init__(through.target, through.draft, through.layers)
        assert isinstance(through.draft, RefreshedKVCache) and through.draft.scores is not None
        self.scores = through.draft.scores

    def begin(self, positions: Tensor) -> tuple[Any, Tensor]:
        self.scores.starts[self.draft.row_indices] = positions[:, 0]
        return super().begin(positions)

    def read(self, layer: int, queries: Tensor | None = None) -> KV:
        kv = super().read(layer, queries)
        if queries is None or layer not in self._draft_layer:
            return kv
        seen = self.scores.seen[self._draft_layer[layer]]
        if self.scores.as_shares:
            return kv._replace(chunk_scores=seen)
        seen[self.draft.row_indices, : queries.shape[1]] = queries
        return kv

    @property
    def by_layer(self) -> list[Tensor] | None:
        through = super().by_layer
        return None if through is None or not self.scores.as_shares else [*through, self.scores.seen]

    def view(self, rows: slice | Tensor = slice(None), extent: int | None = None) -> ObservingKVCache:
        return ObservingKVCache(super().view(rows, extent))


class SelectionOps:
    """Selects entries and copies them, in PyTorch. Kernels override these methods (`models.attention.selection`)."""

    def choose(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, share: Tensor, ends: Tensor
    ) -> None:
        """Copy the entries of the best chunks of a layer of `source` to the first slots of a layer of `to`.

        share: the attention that each chunk gets, `[B, n_kv_head, n_chunk]` float32. ends: entries at positions below
        are chosen, `[B]` int64; a row with 0 stays as it is. The slots are filled in any order.
        """
        share = share[..., : -(-source.keys.shape[3] // to.chunk)]
        chosen = self.best_chunks(share, to.chunk, ends, to.n_first, to.n_fixed)
        self.copy_chosen(to, to_layer, source, from_layer, chosen, ends > 0)

    def best_chunks(self, share: Tensor, chunk: int, ends: Tensor, n_first: int, n_chosen: int) -> Tensor:
        """Return the entries of the best chunks, `[B, n_kv_head, n_chosen]`, of texts that end at `ends [B]`.

        The first `n_first` entries, whole chunks, are always chosen; then chunks by `share [B, n_kv_head, n_chunk]`
        float32, 0 or more. The last chunk may be cut. For texts with fewer entries, the result is arbitrary.
        """
        at = torch.arange(share.shape[-1], device=share.device)
        ranks = share.masked_fill(at < n_first // chunk, float("inf"))
        ranks = ranks.masked_fill(at * chunk >= ends[:, None, None], -1)
        # Of equal shares the first are chosen: a key is the bits of the float, then how early the chunk comes.
        keys = (ranks.view(torch.int32).long() << 32) - at
        # One chunk more, since `ends` may cut a chunk.
        best = keys.topk(min(len(at), -(-n_chosen // chunk) + 1)).indices
        entries = entries_of(best, chunk)
        in_order = (entries >= ends[:, None, None]).byte().sort(dim=-1, stable=True).indices
        return entries.gather(-1, in_order[..., :n_chosen])

    def copy_chosen(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, chosen: Tensor, is_new: Tensor
    ) -> None:
        """Copy a layer's entries at the slots `chosen [B, n_kv_head, n]` of `source` to the first n slots of `to`, in
        any order, in the rows where `is_new [B]`. The caches may have different dtypes."""
        found = stored_as(*source.gather(from_layer, chosen), to.entries.dtype)
        for stored, new in zip((to.entries, to.scales), found, strict=True):
            if stored is not None and new is not None:
                is_written, n = is_new.view(-1, *[1] * (new.dim() - 2)), chosen.shape[-1]
                before = stored[to_layer][:, to.stored_rows, :, :n]
                stored[to_layer][:, to.stored_rows, :, :n] = torch.where(is_written, new, before)


def entries_of(chunks: Tensor, chunk: int) -> Tensor:
    """Return the positions in `chunks [..., n]`: `[..., n * chunk]`."""
    return (chunks[..., None] * chunk + torch.arange(chunk, device=chunks.device)).flatten(-2)


class RefreshedKVCache(ScoredKVCache):
    """Selects from a prompt like SnapKV, and anew with `choose`, which a self-draft calls every `refresh_every` rounds.

    Each layer and KV head keeps the text's first `n_first` tokens, its last `window`, and the best chunks of `chunk`
    tokens between them. A subclass defines `new_scores`, buffers for what verifications record, and `chunk_shares`, by
    which chunks are ranked. scores: the records of verifications, which a drafter makes. Errors: ConfigError from
    ScoredKVCache, or if `refresh` or `n_sink` is too small.
    """

    def __init__(self, config: KVShape, max_batch: int, policy: Refreshed, device: Device, dtype: torch.dtype) -> None:
        require_at_least("n_sink", policy.n_sink, 0)
        require_at_least("refresh", policy.refresh, 1)
        super().__init__(config, max_batch, policy, device, dtype)
        self.n_first, self.refresh_every, self.chunk = policy.n_first, policy.refresh, policy.score_chunk
        # The source's slot of each chosen entry: a copy can leave entries in place that are chosen again.
        self.source_slots = torch.full((*self.keys.shape[:3], self.n_fixed), EMPTY, device=device)
        self.scores: VerificationScores | None = None

    def reset_row(self, row: int) -> None:
        super().reset_row(row)
        self.source_slots[:, row] = EMPTY

    def fill_row(self, row: int, *given: Any, **options: Any) -> None:
        super().fill_row(row, *given, **options)
        if self.scores is not None:
            self.scores.forget(row)

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.source_slots.nbytes

    @abstractmethod
    def new_scores(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        """Return empty records of verifications of up to `n_token` tokens by `n_head` heads, with queries in `dtype`,
        over `capacity` entries a row."""

    def follow_text(self, source: KVCache, lengths: Tensor, n_token: int, layers: Sequence[int]) -> None:
        """Update what chunks are ranked by to the text of each row, also while the cache holds the whole text.

        n_token: the most tokens of a verification. Other arguments are those of `choose`.
        """

    @abstractmethod
    def chunk_shares(
        self, source: KVCache, lengths: Tensor, n_accepted: Tensor, seen: Tensor, layers: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield for each layer the attention that chunks get, `[B, n_kv_head, n_chunk]` float32.

        n_accepted: the tokens of each row's last verification that stand, `[B]`; below 1 if there was none. seen:
        `VerificationScores.seen`. Other arguments are those of `choose`.
        """

    def choose(self, source: KVCache, lengths: Tensor, layers: Sequence[int], ops: SelectionOps) -> None:
        """Select entries anew from `source`, whose rows hold `lengths [B]` tokens in order.

        A row stays as it is if it verified nothing since it was filled, or if the cache holds its whole text. layers:
        the source's layers that this cache has, in order.
        """
        scores = self.scores
        assert scores is not None
        self.follow_text(source, lengths, scores.seen.shape[2], layers)
        if source.keys.shape[3] <= self.capacity:
            return
        n_accepted = lengths - scores.starts[self.row_indices]
        ends = torch.where((n_accepted > 0) & (lengths > self.capacity), lengths - self.window, 0)
        shares = self.chunk_shares(source, lengths, n_accepted, scores.seen, layers)
        for to_layer, (from_layer, share) in enumerate(zip(layers, shares, strict=True)):
            ops.choose(self, to_layer, source, from_layer, share, ends)


@dataclass(frozen=True)
class Refreshed(SnapKV):
    """A policy of self-drafts that selects entries anew while decoding."""

    of_self_drafts: ClassVar[bool] = True
    n_sink: int = 4
    """attention sinks in the budget, rounded up to whole chunks"""
    refresh: int = 4
    """rounds after which entries are chosen anew"""

    @property
    def score_chunk(self) -> int:
        """The number of entries of a chunk, which are chosen together."""
        return SCORE_CHUNK

    @property
    def n_first(self) -> int:
        """The number of a text's first entries that always stay, a multiple of the chunk."""
        return -(-self.n_sink // self.score_chunk) * self.score_chunk

    @property
    def reserved(self) -> int:
        return self.n_first + self.snapkv_window
