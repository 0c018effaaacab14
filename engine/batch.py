"""Batch: what rounds read of the rows that they compute, in tensors that stay where they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from engine.sampling import Distribution, Filters, SamplingParams
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.base import Device


class Batch:
    """Each row's length, last two tokens, distribution, seed and request id; at first all are 0, and greedy.

    It has the rows of the caches, in order, or is the `first` ones of such a batch, each of which can be any row there.

    filters: those that any row will use. narrows: whether a round reads only the slots that its positions can take;
    captured rounds keep one shape instead.
    """

    def __init__(self, n_rows: int, filters: Filters, device: Device = "cpu", narrows: bool = True) -> None:
        self.distribution = Distribution.of([SamplingParams()] * n_rows, device, filters)
        self.narrows, self._longest = narrows, 0
        self._is_whole, self._firsts = True, {n_rows: self}
        self._view(torch.zeros(7, n_rows, dtype=torch.int64, device=device))
        self.rows.copy_(torch.arange(n_rows))

    def _view(self, state: torch.Tensor) -> None:
        """`lengths [B]` int64: the position of each row's last token, `current [B]`, which is in no cache yet; the one
        before it is `previous [B]`. `rows [B]`: which row of the caches, and of a drafter's own state, each is.
        `idle [B]`: 1 for a row that no request decodes, else 0."""
        self._state = state
        self.lengths, self.previous, self.current, self.seeds, self.requests, self.rows, self.idle = state

    def first(self, n: int) -> Batch:
        """So many rows of this batch, in its tensors; always the same object, and the batch itself if these are all."""
        if n not in self._firsts:
            fewer = self._firsts[n] = copy.copy(self)
            fewer.distribution, fewer._is_whole = self.distribution.first(n), False
            fewer._view(self._state[:, :n])
        return self._firsts[n]

    def ahead(self, n: torch.Tensor, previous: torch.Tensor, current: torch.Tensor, most: int) -> Batch:
        """The same rows, each `n [B]` tokens on, at most `most`, of which these are the last two."""
        further = copy.copy(self)
        further.lengths, further.previous, further.current = self.lengths + n, previous, current
        further._longest = self._longest + most
        return further

    def view_of(self, cache: KVCache | WriteThroughKVCache, gamma: int | None = None) -> Any:
        """A cache's rows of this batch; with gamma, only the slots that a round of so many drafts can take."""
        rows = slice(None) if self._is_whole else self.rows
        return cache.view(rows, None if gamma is None else self.extent(gamma))

    def positions(self, n_token: int) -> torch.Tensor:
        """Return the positions `[B, n_token]` of each row's current token and those behind it."""
        return self.lengths[:, None] + torch.arange(n_token, device=self.lengths.device)

    def extent(self, gamma: int) -> int | None:
        """What all positions of a round of `gamma` drafts are below; None where rounds keep the cache's whole shape."""
        return self._longest + gamma + 1 if self.narrows else None

    def set_rows(
        self, sampling: Sequence[SamplingParams], requests: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """How each row is sampled, the request that its random numbers are for, and which row of the caches it is."""
        self.distribution.copy_(Distribution.of(sampling, self._state.device, self.distribution.filters))
        seeds, rows = [row.seed for row in sampling], range(len(sampling)) if rows is None else rows
        self._state[3:6].copy_(torch.tensor([seeds, [*requests], [*rows]]))

    def set_state(self, lengths: Sequence[int], previous: Sequence[int], current: Sequence[int]) -> None:
        self._state[:3].copy_(torch.tensor([lengths, previous, current]))
        self._longest = max(lengths)
