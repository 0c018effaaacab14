"""RefreshedKVCache: a self-draft's entries, selected anew as rounds go on, by what the target's verification saw."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import EMPTY, Device, KVCache, KVShape
from kv_cache.entries import KV, SCORE_CHUNK, stored_as
from kv_cache.scored import ScoredKVCache
from kv_cache.snapkv import SnapKV
from kv_cache.views import WriteThroughKVCache


class VerificationScores:
    """Scores that a cache selects by: queries of each row's last verified block, or the attention that it gave.

    Tensors stay where they are; a shorter block fills the first tokens.

    starts: the position of the block's first token, `[max_batch]` int64, beyond any length where there was none.
    seen: its queries, `[n_layer, max_batch, n_token, n_head, head_dim]`, or with `as_shares` what `KV.chunk_scores`
    takes of each layer, `[n_layer, max_batch, n_token, n_kv_head, capacity / SCORE_CHUNK]`.
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
    """A write-through view that also records, in `scores`, what the draft's cache will select its entries by."""

    def __init__(self, through: WriteThroughKVCache, scores: VerificationScores) -> None:
        super().__init__(through.target, through.draft, through.layers)
        self.scores = scores

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

    def view(self, rows: slice | Tensor = slice(None), extent: int | None = None) -> ObservingKVCache:
        return ObservingKVCache(super().view(rows, extent), self.scores)


class Choice(NamedTuple):
    """Arguments of a selection that are the same in every layer, for the B rows of a batch."""

    rows: slice | Tensor  # the batch's rows among the rows of `shares`
    counts: Tensor  # how often the shares of each token count, `[B, n_token]` float32
    ends: Tensor  # only entries at positions below these are chosen, `[B]` int64
    is_new: Tensor  # whether the row chooses at all, `[B]`


class SelectionOps:
    """Chooses entries and copies them, in PyTorch; attention backends and Triton kernels override this."""

    def choose(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, shares: Tensor, choice: Choice
    ) -> None:
        """Choose entries of a layer of `source` by attention, and copy them to the first slots of the same rows of a
        layer of `to`, in any order. shares: of each token's attention by chunk, `[rows, n_token, n_kv_head, n_chunk]`
        float32; `best_chunks` ranks their sum over tokens."""
        given = shares[choice.rows]
        share = (choice.counts[:, None] @ given.flatten(2)).view(len(given), *given.shape[2:])
        share = share[..., : -(-source.keys.shape[3] // to.chunk)]
        chosen = self.best_chunks(share, to.chunk, choice.ends, to.n_first, to.n_sink)
        self.copy_chosen(to, to_layer, source, from_layer, chosen, choice.is_new)

    def best_chunks(self, share: Tensor, chunk: int, ends: Tensor, n_first: int, n_chosen: int) -> Tensor:
        """Return the entries of the best chunks, `[B, n_kv_head, n_chosen]`, of texts that end at `ends [B]`.

        The first `n_first` entries, whole chunks, are always chosen; then chunks by `share [B, n_kv_head, n_chunk]`
        float32, 0 or more. The last chunk may be cut. Texts with fewer entries get any.
        """
        at = torch.arange(share.shape[-1], device=share.device)
        ranks = share.masked_fill(at < n_first // chunk, float("inf"))
        ranks = ranks.masked_fill(at * chunk >= ends[:, None, None], -1)
        # Among equals the first are chosen, whatever else there is: the bits of a float, then how early it comes.
        keys = (ranks.view(torch.int32).long() << 32) - at
        # The chunk that the end cuts has fewer entries.
        best = keys.topk(min(len(at), -(-n_chosen // chunk) + 1)).indices
        entries = entries_of(best, chunk)
        in_order = (entries >= ends[:, None, None]).byte().sort(dim=-1, stable=True).indices
        return entries.gather(-1, in_order[..., :n_chosen])

    def copy_chosen(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, chosen: Tensor, is_new: Tensor
    ) -> None:
        """Copy a layer's entries at the slots `chosen [B, n_kv_head, n]`, from any storage to any, to the first n slots
        of the rows that the mask `is_new [B]` names, in any order."""
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
    """Selects from a prompt as SnapKV; a self-draft calls `choose` after every `refresh_every` rounds.

    Each layer and KV head keeps the text's first `n_first` tokens, its last `window`, and the best chunks of `chunk`
    tokens of the others. Errors: ConfigError as of ScoredKVCache, or if `refresh` or `n_sink` is too small.
    """

    def __init__(self, config: KVShape, max_batch: int, policy: Refreshed, device: Device, dtype: torch.dtype) -> None:
        require_at_least("n_sink", policy.n_sink, 0)
        require_at_least("refresh", policy.refresh, 1)
        super().__init__(config, max_batch, policy, device, dtype)
        self.n_first, self.refresh_every, self.chunk = policy.n_first, policy.refresh, policy.n_together
        # The slot that each chosen entry came from, so that a copy can leave entries in place that are chosen again.
        self.held = torch.full((*self.keys.shape[:3], self.n_sink), EMPTY, device=device)

    def reset_row(self, row: int) -> None:
        super().reset_row(row)
        self.held[:, row] = EMPTY

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.held.nbytes

    @abstractmethod
    def observer(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        """Return what `choose` goes by: of verifications of up to `n_token` tokens by `n_head` heads, whose queries are
        in `dtype`, over `capacity` entries a row."""

    @abstractmethod
    def choose(
        self, source: KVCache, lengths: Tensor, scores: VerificationScores, layers: Sequence[int], ops: SelectionOps
    ) -> None:
        """Choose from `source`, whose rows hold `lengths [B]` tokens in order, by what they verified last. Rows stay as
        they are that verified nothing since they were filled, or whose whole text the cache holds. layers: the source's
        layers that this cache has, in order."""


@dataclass(frozen=True)
class Refreshed(SnapKV):
    """A policy of self-drafts, whose entries are chosen anew."""

    of_self_drafts: ClassVar[bool] = True
    n_sink: int = 4
    """attention sinks in the budget; of chunks that are kept whole, as many as hold them"""
    refresh: int = 4
    """rounds after which entries are chosen anew"""

    @property
    def n_together(self) -> int:
        """Entries of a chunk, of which all are chosen or none."""
        return SCORE_CHUNK

    @property
    def n_first(self) -> int:
        return -(-self.n_sink // self.n_together) * self.n_together

    @property
    def reserved(self) -> int:
        return self.n_first + self.snapkv_window
