"""RetrievalKVCache: the chunks of a text whose mean keys the newest query attends to most (TriForce)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import require_at_least
from kv_cache.base import Device, KVCache, KVShape, PromptEntries
from kv_cache.entries import LARGEST, dequantize
from kv_cache.refreshed import Refreshed, RefreshedKVCache, SelectionOps, VerificationScores, entries_of
from kv_cache.snapkv import attention_received


class RetrievalKVCache(RefreshedKVCache):
    """Keeps the chunks whose mean keys the newest query attends to most (TriForce, arXiv 2404.11912, section 4.1): the
    query of the prompt's last token, then every `refresh_every` rounds the query of the last accepted token.

    means: mean keys of the whole chunks of each row's text, `[n_layer, max_batch, n_kv_head, longest // chunk,
    head_dim]`, kept up as the text grows. Errors: ConfigError from RefreshedKVCache, or if a chunk is longer than the
    window.
    """

    def __init__(
        self, config: KVShape, max_batch: int, longest: int, policy: Retrieval, device: Device, dtype: torch.dtype
    ) -> None:
        require_at_least("chunk", policy.chunk, 1)
        # Every token before the window is then in a whole chunk.
        require_at_least("snapkv_window", policy.snapkv_window, policy.chunk)
        super().__init__(config, max_batch, policy, device, dtype)
        self.max_length = longest
        shape = (config.n_layer, max_batch, config.n_kv_head, longest // policy.chunk, config.head_dim)
        self.means = torch.zeros(shape, device=device, dtype=torch.float32 if dtype in LARGEST else dtype)

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.means.nbytes

    def filled(self, layer: int, row: int, text: PromptEntries, n_known: int) -> None:
        # Chunks that the text has filled since the last choice have no means.
        first = max(0, n_known - self.refresh_every * self.window) // self.chunk
        means = self._means(replace(text, first=first * self.chunk).keys)
        self.means[layer, row, :, first : first + means.shape[1]] = means

    def selected(self, kept: Tensor, prompt: PromptEntries) -> Tensor:
        means, ends = self._means(prompt.keys), torch.tensor([prompt.length - self.window], device=kept.device)
        share = attention_received(prompt.queries, means, self._is_hidden(ends, means.shape[1]))
        chosen = SelectionOps().best_chunks(share[None], self.chunk, ends, self.n_first, self.n_fixed)[0]
        return torch.cat([chosen.sort(dim=1).values, kept[self.n_fixed :].expand(len(chosen), -1)], dim=1)

    def new_scores(self, n_token: int, n_head: int, dtype: torch.dtype, capacity: int) -> VerificationScores:
        shape = *self.keys.shape[:2], n_token, n_head, self.keys.shape[-1]
        return VerificationScores(shape, self.device, dtype, as_shares=False)

    def follow_text(self, source: KVCache, lengths: Tensor, n_token: int, layers: Sequence[int]) -> None:
        rows, extent = self.row_indices, source.keys.shape[3]
        # The chunks that a row's text may have filled since the last choice, or since the row was filled.
        ahead = torch.arange(2 + self.refresh_every * n_token // self.chunk, device=self.device)
        filled = (lengths[:, None] // self.chunk - 1 - ahead).clamp(min=0)
        slots, row = entries_of(filled, self.chunk).clamp(max=extent - 1), rows[:, None]
        for to_layer, from_layer in enumerate(layers):
            scales = None if source.scales is None else source.scales[from_layer, 0][row, :, slots]
            keys = dequantize(source.keys[from_layer][row, :, slots], scales, self.means.dtype)
            self.means[to_layer][row, :, filled] = keys.unflatten(1, (-1, self.chunk)).mean(dim=2)

    def chunk_shares(
        self, source: KVCache, lengths: Tensor, n_accepted: Tensor, seen: Tensor, layers: Sequence[int]
    ) -> Iterator[Tensor]:
        newest = (n_accepted - 1).clamp(min=0, max=seen.shape[2] - 1)
        n_whole = min(source.keys.shape[3] // self.chunk, self.means.shape[3])
        is_hidden = self._is_hidden(lengths - self.window, n_whole)[:, None]
        for to_layer in range(len(layers)):
            queries = seen[to_layer][self.row_indices, newest][:, :, None]
            yield attention_received(queries, self.means[to_layer][self.stored_rows, :, :n_whole], is_hidden)

    def _means(self, keys: Tensor) -> Tensor:
        """Return the means of the whole chunks of `keys [..., n, D]`: `[..., n // chunk, D]`."""
        n_whole = keys.shape[-2] // self.chunk * self.chunk
        return keys[..., :n_whole, :].unflatten(-2, (-1, self.chunk)).mean(dim=-2).to(self.means.dtype)

    def _is_hidden(self, ends: Tensor, n_chunk: int) -> Tensor:
        """Return the mask `[B, n_chunk]` of chunks that begin at or after `ends [B]`; the first is never hidden."""
        chunks = torch.arange(n_chunk, device=ends.device)
        return chunks > ((ends - 1) // self.chunk).clamp(min=0)[:, None]


@dataclass(frozen=True)
class Retrieval(Refreshed):
    """Sinks, recent tokens, and the chunks whose mean keys the newest query attends to most, of a self-draft."""

    name: ClassVar[str] = "retrieval"
    chunk: int = 8
    """tokens of a chunk, which are chosen together"""

    @property
    def score_chunk(self) -> int:
        return max(1, self.chunk)

    @property
    def n_queries(self) -> int:
        return 1

    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        return RetrievalKVCache(config, max_batch, length, self, device, dtype)
