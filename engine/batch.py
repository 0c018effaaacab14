"""Batch: the state of the rows that a round computes, in tensors that stay in place for captured rounds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.sampling.distribution import Distribution, Filters, SamplingParams
from engine.sampling.grammars import Masks
from engine.sampling.processors import LogitsProcessors, ProcessedRequest
from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.base import Device


class Batch:
    """The state of B rows: all rows of the caches in order, or some of them (see `first`). Its tensors begin as 0, and
    its rows as greedy.

    lengths `[B]` int64: the number of a row's tokens that have entries. current `[B]`: the token at that position,
    which has no entry yet; previous `[B]`: the token before it. seeds, requests `[B]`: key the row's random numbers.
    rows `[B]`: its index in the caches and in a drafter's state. idle `[B]`: 1 for a row that no request decodes, else
    0. filters: all that any row will use. narrows: True if a round reads only the slots that its positions can take;
    captured rounds keep the same shape instead. n_ids: the vocabulary, for `processors`, which are None without rows
    that need them, and `masks`.
    """

    def __init__(
        self, n_rows: int, filters: Filters, device: Device = "cpu", narrows: bool = True, n_ids: int = 0
    ) -> None:
        self.distribution = Distribution.of([SamplingParams()] * n_rows, device, filters)
        self.processors = LogitsProcessors(n_rows, n_ids, device) if filters.any_edits else None
        self.masks = Masks(n_rows, n_ids, device)
        self.narrows, self._longest = narrows, 0
        self._is_whole, self._firsts = True, {n_rows: self}
        self._set_tensors(torch.zeros(7, n_rows, dtype=torch.int64, device=device))
        self.rows.copy_(torch.arange(n_rows))

    def _set_tensors(self, state: Tensor) -> None:
        self._state = state
        self.lengths, self.previous, self.current, self.seeds, self.requests, self.rows, self.idle = state

    def first(self, n: int) -> Batch:
        """Return a batch of `n` rows in this batch's tensors: for all rows, this batch."""
        if n not in self._firsts:
            fewer = self._firsts[n] = copy.copy(self)
            fewer.distribution, fewer._is_whole = self.distribution.first(n), False
            fewer._set_tensors(self._state[:, :n])
        return self._firsts[n]

    def ahead(self, n: Tensor, previous: Tensor, current: Tensor, most: int) -> Batch:
        """Return these rows `n [B] <= most` tokens further on, where they end with `previous` and `current`."""
        further = copy.copy(self)
        further.lengths, further.previous, further.current = self.lengths + n, previous, current
        further._longest = self._longest + most
        return further

    def processed(self, logits: Tensor, drafts: Tensor, ahead: int = 0) -> Tensor:
        """Return `logits [B, T, V]` after each row's processors and its grammar's mask, where step t follows t of
        `drafts [B, T - 1]`; without these, the logits themselves. ahead: tokens of this round before step 0, of which
        only the number counts."""
        logits = logits if self.processors is None else self.processors(logits, drafts, ahead)
        return self.masks.masked(logits, ahead)

    def processed_draft(self, logits: Tensor, i: int) -> Tensor:
        """Return the i-th draft's `logits [B, V]` after the processors, for which a text ends at the round's start."""
        return self.processed(logits[:, None], self.current[:, None][:, :0], i)[:, 0]

    def view_of(self, cache: KVCache | WriteThroughKVCache, gamma: int | None = None) -> Any:
        """Return the batch's rows of a cache; with gamma, only the slots that a round of `gamma` drafts can take."""
        rows = slice(None) if self._is_whole else self.rows
        return cache.view(rows, None if gamma is None else self.extent(gamma))

    def positions(self, n_token: int) -> Tensor:
        """Return the positions `[B, n_token]` of each row's current token and those after it."""
        return self.lengths[:, None] + torch.arange(n_token, device=self.lengths.device)

    def extent(self, gamma: int) -> int | None:
        """Return a bound above all positions of a round of `gamma` drafts; None where rounds keep the cache's shape."""
        return self._longest + gamma + 1 if self.narrows else None

    def set_rows(
        self, sampling: Sequence[SamplingParams], requests: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """Set each row's sampling, the request id that keys its random numbers, and its index in the caches."""
        self.distribution.copy_(Distribution.of(sampling, self._state.device, self.distribution.filters))
        seeds, rows = [row.seed for row in sampling], range(len(sampling)) if rows is None else rows
        self._state[3:6].copy_(torch.tensor([seeds, [*requests], [*rows]]))

    def set_state(
        self,
        lengths: Sequence[int],
        previous: Sequence[int],
        current: Sequence[int],
        requests: Sequence[ProcessedRequest] = (),
    ) -> None:
        """Set each row's length and last two tokens. requests: each row's, for processors and masks."""
        self.masks.grammars, self.masks.applies = [request.grammar for request in requests], False
        if self.processors:
            self.processors.follow([*requests])
        self._state[:3].copy_(torch.tensor([lengths, previous, current]))
        self._longest = max(lengths)
