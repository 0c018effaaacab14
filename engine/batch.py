"""Batch: what rounds read of the rows that they decode, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.noise import Source, in_passes
from engine.sampling import Distribution, Filters, SamplingParams


class Batch:
    """Each row's length, last two tokens, distribution, seed and request id; at first all are 0, and greedy.

    filters: those that any row will use. source: what draws the uniform numbers, see `noise.uniform`.
    narrows: whether a round reads only the slots that its positions can take; captured rounds keep one shape instead.
    """

    def __init__(
        self,
        n_rows: int,
        filters: Filters,
        device: str | torch.device = "cpu",
        source: Source = in_passes,
        narrows: bool = True,
    ) -> None:
        self.distribution = Distribution.of([SamplingParams()] * n_rows, device, filters)
        self.source = source
        self._narrows, self._longest = narrows, 0
        self._state = torch.zeros(5, n_rows, dtype=torch.int64, device=device)
        # `lengths [B]` int64: the position of each row's last token, `current [B]`, which is in no cache yet; the one
        # before it is `previous [B]`.
        self.lengths, self.previous, self.current, self.seeds, self.requests = self._state

    def extent(self, gamma: int) -> int | None:
        """What all positions of a round of `gamma` drafts are below; None where rounds keep the cache's whole shape."""
        return self._longest + gamma + 1 if self._narrows else None

    def set_rows(self, sampling: Sequence[SamplingParams], requests: Sequence[int]) -> None:
        """How each row is sampled, and the request that its random numbers are for."""
        self.distribution.copy_(Distribution.of(sampling, self._state.device, self.distribution.filters))
        self._state[3:].copy_(torch.tensor([[row.seed for row in sampling], requests]))

    def set_state(self, lengths: Sequence[int], previous: Sequence[int], current: Sequence[int]) -> None:
        self._state[:3].copy_(torch.tensor([lengths, previous, current]))
        self._longest = max(lengths)
