"""RetrievalKVCache: the chunks of a text whose mean keys the newest query attends to most (TriForce)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import Device, KVCache, KVShape, NewTensor
from kv_cache.entries import dequantize, largest
from kv_cache.refreshed import Choice, Refreshed, RefreshedKVCache, SelectionOps, VerificationScores, entries_of
from kv_cache.snapkv import attention_received


class RetrievalKVCache(RefreshedKVCache):
    """Keeps the chunks whose mean keys the newest query attends to most (TriForce, arXiv 2404.11912, section 4.1): the
    prompt's last query, then every `refresh_every` rounds that of the last accepted token.

    means: those keys `[n_layer, max_batch, n_kv_head, longest // chunk, head_dim]` of the chunks that a row's text
    fills, kept up as it grows. Errors: ConfigError as of RefreshedKVCache, or if a chunk is longer than the window.
    """

    def __init__(
        self, config: KVShape, max_batch: int, longest: int, policy: Retrieval, device: Device, dtype: torch.dtype
    ) -> None:
        chunk = policy.chunk
        require_at_least("chunk", chunk, 1)
        # Every token before the window has to lie in a chunk that the text fills.
        require_at_least("snapkv_window", policy.snapkv_window, chunk)
        super().__init__(config, max_batch, policy, device, dtype)
        self._longest = longest
        shape = (config.n_layer, max_batch, config.n_kv_head, longest // chunk, config.head_dim)
        self.means = torch.zeros(shape, device=device, dtype=torch.float32 if dtype in largest() else dtype)

    @property
    def max_length(self) -> int:
        return self._longest

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.means.nbytes

    def filled(self, layer: int, row: int, keys: NewTensor, n_known: int) -> None:
        # From the last choice on: chunks that the text has filled since have no means.
        first = max(0, n_known - self.refresh_every * self.window) // self.chunk
        means = self._means(keys(first * self.chunk))
        self.means[layer, row, :, first : first + means.shape[1]] = means

    def selected(self, kept: Tensor, length: int, keys: NewTensor, queries: NewTensor) -> Tensor:
        means, ends = self._means(keys()), torch.tensor([length - self.window], device=kept.device)
        share = attention_received(queries(), means, self._is_hidden(ends, means.shape[1]))
        chosen = SelectionOps().best_chunks(share[None], self.chunk, ends, self.n_first, self.n_sink)[0]
        return torch.cat([chosen.sort(dim=1).values, kept[self.n_sink :].expand(len(chosen), -1)], dim=1)

    def observer(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        shape = *self.keys.shape[:2], n_token, n_head, self.keys.shape[-1]
        return VerificationScores(shape, self.device, dtype, as_shares=False)

    def choose(
        self, source: KVCache, lengths: Tensor, scores: VerificationScores, layers: Sequence[int], ops: SelectionOps
    ) -> None:
        rows, extent = self.row_indices, source.keys.shape[3]
        n_accepted, most = lengths - scores.starts[rows], scores.seen.shape[2]
        newest = (n_accepted - 1).clamp(min=0, max=most - 1)
        is_new = (n_accepted > 0) & (lengths > self.capacity)
        # Chunks that a row's text may have filled since entries were chosen last, or the row was filled.
        ahead = torch.arange(2 + self.refresh_every * most // self.chunk, device=self.device)
        filled = (lengths[:, None] // self.chunk - 1 - ahead).clamp(min=0)
        slots = entries_of(filled, self.chunk).clamp(max=extent - 1)
        ends, named, whole = lengths - self.window, rows[:, None], min(extent // self.chunk, self.means.shape[3])
        once = torch.ones_like(lengths[:, None], dtype=torch.float32)
        is_hidden, choice = self._is_hidden(ends, whole)[:, None], Choice(slice(None), once, ends, is_new)
        for to_layer, from_layer in enumerate(layers):
            scales = None if source.scales is None else source.scales[from_layer, 0][named, :, slots]
            keys = dequantize(source.keys[from_layer][named, :, slots], scales, self.means.dtype)
            self.means[to_layer][named, :, filled] = keys.unflatten(1, (-1, self.chunk)).mean(dim=2)
            if extent > self.capacity:
                queries = scores.seen[to_layer][rows, newest][:, :, None]
                # A copy of the named rows, which no variable keeps while entries are copied.
                share = attention_received(queries, self.means[to_layer][self.stored_rows, :, :whole], is_hidden)
                ops.choose(self, to_layer, source, from_layer, share[:, None], choice)

    def _means(self, keys: Tensor) -> Tensor:
        """Return the means of the whole chunks of `keys [..., n, D]`: `[..., n // chunk, D]`."""
        n_whole = keys.shape[-2] // self.chunk * self.chunk
        return keys[..., :n_whole, :].unflatten(-2, (-1, self.chunk)).mean(dim=-2).to(self.means.dtype)

    def _is_hidden(self, ends: Tensor, n_chunk: int) -> Tensor:
        """Return the mask `[B, n_chunk]` of chunks that begin at or behind `ends [B]`; the first is never hidden."""
        at = torch.arange(n_chunk, device=ends.device)
        return at > ((ends - 1) // self.chunk).clamp(min=0)[:, None]


@dataclass(frozen=True)
class Retrieval(Refreshed):
    """Sinks, recent tokens, and the chunks whose mean keys the newest query attends to most, of a self-draft."""

    name: ClassVar[str] = "retrieval"
    chunk: int = 8
    """tokens of a chunk, which is read whole or not at all"""

    @property
    def n_together(self) -> int:
        return max(1, self.chunk)

    @property
    def n_queries(self) -> int:
        return 1

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return RetrievalKVCache(config, max_batch, length, self, device, dtype)
