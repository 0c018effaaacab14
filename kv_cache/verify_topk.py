"""VerifyTopKCache: what verification itself attended to most, chosen anew as rounds go on (Vegas, PillarAttn)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from common.errors import require_at_least
from kv_cache.base import EMPTY, Device, KVCache, KVShape
from kv_cache.entries import KV, SCORE_CHUNK, stored_as
from kv_cache.scored import ScoredKVCache
from kv_cache.snapkv import SnapKV
from kv_cache.views import WriteThroughKVCache


class VerificationScores:
    """What a cache selects its entries by, of the last block that was verified in each row, in tensors that stay where
    they are; a shorter block fills the first tokens.

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

    def begin(self, positions: torch.Tensor) -> tuple[Any, torch.Tensor]:
        self.scores.starts[self.draft.row_indices] = positions[:, 0]
        return super().begin(positions)

    def read(self, layer: int, queries: torch.Tensor | None = None) -> KV:
        kv = super().read(layer, queries)
        if queries is None or layer not in self._draft_layer:
            return kv
        seen = self.scores.seen[self._draft_layer[layer]]
        if self.scores.as_shares:
            return kv._replace(chunk_scores=seen)
        seen[self.draft.row_indices, : queries.shape[1]] = queries
        return kv

    def view(self, rows: slice | torch.Tensor = slice(None), extent: int | None = None) -> ObservingKVCache:
        return ObservingKVCache(super().view(rows, extent), self.scores)


class Choice(NamedTuple):
    """Arguments of a choice of entries that are the same in every layer, for the B rows of a batch."""

    rows: slice | torch.Tensor  # the batch's rows among the rows of `shares`
    counts: torch.Tensor  # how often the shares of each token count, `[B, n_token]` float32
    ends: torch.Tensor  # only entries at positions below these are chosen, `[B]` int64
    is_new: torch.Tensor  # whether the row chooses at all, `[B]`


class SelectionOps:
    """How entries are chosen and copied, in PyTorch; a backend of attention may have kernels for it."""

    def choose(
        self, to: VerifyTopKCache, to_layer: int, source: KVCache, from_layer: int, shares: torch.Tensor, choice: Choice
    ) -> None:
        """Choose entries of a layer of `source` by attention, and copy them to the first slots of the same rows of a
        layer of `to`, in any order.

        shares: of each token's attention by chunk, `[rows, n_token, n_kv_head, n_chunk]` float32; `best_chunks` ranks
        their sum over tokens."""
        given = shares[choice.rows]
        share = (choice.counts[:, None] @ given.flatten(2)).view(len(given), *given.shape[2:])
        share = share[..., : -(-source.keys.shape[3] // to.chunk)]
        chosen = self.best_chunks(share, to.chunk, choice.ends, to.n_first, to.n_sink)
        self.copy_chosen(to, to_layer, source, from_layer, chosen, choice.is_new)

    def best_chunks(
        self, share: torch.Tensor, chunk: int, ends: torch.Tensor, n_first: int, n_chosen: int
    ) -> torch.Tensor:
        """Of a text's entries before `ends [B]`, which lie in chunks with `share [B, n_kv_head, n_chunk]` float32, 0 or
        more, the first `n_first`, which are whole chunks, and those of the best others: `[B, n_kv_head, n_chosen]`, of
        which the last chunk may be cut. Of texts with fewer entries any."""
        at = torch.arange(share.shape[-1], device=share.device)
        ranks = share.masked_fill(at < n_first // chunk, float("inf"))
        ranks = ranks.masked_fill(at * chunk >= ends[:, None, None], -1)
        # Of equals the first are chosen, whatever else there is: the bits of a float, then how early it comes.
        keys = (ranks.view(torch.int32).long() << 32) - at
        # Of one chunk, which the end cuts, there are fewer entries.
        best = keys.topk(min(len(at), -(-n_chosen // chunk) + 1)).indices
        entries = entries_of(best, chunk)
        in_order = (entries >= ends[:, None, None]).byte().sort(dim=-1, stable=True).indices
        return entries.gather(-1, in_order[..., :n_chosen])

    def copy_chosen(
        self,
        to: VerifyTopKCache,
        to_layer: int,
        source: KVCache,
        from_layer: int,
        chosen: torch.Tensor,
        is_new: torch.Tensor,
    ) -> None:
        """Into a layer of a cache, of a layer of another, from any storage to any: its entries at the slots `chosen [B,
        n_kv_head, n]`, which take the first n slots of rows that a mask `[B]` names, in any order."""
        found = stored_as(*source.gather(from_layer, chosen), to.entries.dtype)
        for own, new in zip((to.entries, to.scales), found, strict=True):
            if own is not None and new is not None:
                is_written, n = is_new.view(-1, *[1] * (new.dim() - 2)), chosen.shape[-1]
                held = own[to_layer][:, to.own_rows, :, :n]
                own[to_layer][:, to.own_rows, :, :n] = torch.where(is_written, new, held)


def entries_of(chunks: torch.Tensor, chunk: int) -> torch.Tensor:
    """The positions in `chunks [..., n]`: `[..., n * chunk]`."""
    return (chunks[..., None] * chunk + torch.arange(chunk, device=chunks.device)).flatten(-2)


class VerifyTopKCache(ScoredKVCache):
    """Selects from a prompt as SnapKV; after every `refresh_every` rounds a self-draft's entries are chosen anew.

    Each layer and KV head keeps the text's first `n_first` tokens, its last `window`, and of the others, in chunks of
    SCORE_CHUNK, those that queries of the last verification attend to most (Vegas, arXiv 2602.07223; PillarAttn, arXiv
    2512.01278): of its first and of its last token that stands ("ends"), or of every token ("all"), the last that
    stands in place of rejected ones. Errors: ConfigError as of ScoredKVCache, or if the policy's `refresh` or `n_sink`
    is too small.
    """

    def __init__(self, config: KVShape, max_batch: int, policy: Refreshed, device: Device, dtype: torch.dtype) -> None:
        require_at_least("n_sink", policy.n_sink, 0)
        super().__init__(config, max_batch, policy, device, dtype)
        self.n_first, self.refresh_every = policy.n_first, policy.refresh
        self._by_ends = isinstance(policy, VerifyTopK) and policy.score_queries == "ends"
        require_at_least("refresh", self.refresh_every, 1)
        self.chunk = SCORE_CHUNK
        # The slot that each chosen entry came from, for a copy that leaves those in place that are chosen again.
        self.held = torch.full((*self.keys.shape[:3], self.n_sink), EMPTY, device=device)

    def reset_row(self, row: int) -> None:
        super().reset_row(row)
        self.held[:, row] = EMPTY

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.held.nbytes

    def observer(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        """What `choose` goes by: of verifications of up to `n_token` tokens by `n_head` heads, whose queries are in
        `dtype`, over `capacity` entries a row."""
        n_layer, max_batch, n_kv_head = self.keys.shape[:3]
        shape = n_layer, max_batch, n_token, n_kv_head, -(-capacity // SCORE_CHUNK)
        return VerificationScores(shape, self.device, torch.float32, as_shares=True)

    def choose(
        self,
        source: KVCache,
        lengths: torch.Tensor,
        observed: VerificationScores,
        layers: Sequence[int],
        ops: SelectionOps,
    ) -> None:
        """Choose from `source`, whose rows hold `lengths [B]` tokens in order, by what they verified last.

        layers: those of the source that this cache has, in order. Rows stay as they are that verified nothing since
        they were filled, or whose whole text the cache holds.
        """
        n_slot = source.keys.shape[3]
        if n_slot <= self.capacity:
            return
        rows = self.row_indices
        n_standing = (lengths - observed.starts[rows])[:, None]
        is_new = (n_standing[:, 0] > 0) & (lengths > self.capacity)
        most = observed.seen.shape[2]
        which = torch.arange(most, device=self.device)[:: max(1, most - 1) if self._by_ends else 1]
        which = torch.minimum(which, n_standing - 1).clamp(min=0)
        # How often each token is among them: shares are summed by a product.
        counts = (which[..., None] == torch.arange(most, device=self.device)).sum(dim=1).float()
        choice = Choice(self.own_rows, counts, lengths - self.window, is_new)
        for to_layer, from_layer in enumerate(layers):
            ops.choose(self, to_layer, source, from_layer, observed.seen[to_layer], choice)


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
        """In whole chunks, as all that is chosen."""
        return -(-self.n_sink // self.n_together) * self.n_together

    @property
    def reserved(self) -> int:
        return self.n_first + self.snapkv_window


@dataclass(frozen=True)
class VerifyTopK(Refreshed):
    """Sinks, recent tokens, and what verification attends to most, of a self-draft."""

    name: ClassVar[str] = "verify_topk"
    refresh: int = 1
    score_queries: Literal["ends", "all"] = "all"
    """by which queries of a verification: its first and last token's that stand, or all"""

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return VerifyTopKCache(config, max_batch, self, device, dtype)
