"""Batch: what rounds read of the rows that they decode, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.modes import Rows
from engine.noise import Source, in_passes
from engine.sampling import Filters, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Batch:
    """`lengths` and `current [B]` int64, and how each row is sampled.

    filters: those that any row will use. narrows: whether a round reads only the slots that its positions can take;
    captured rounds keep one shape instead.
    """

    def __init__(
        self,
        n_rows: int,
        filters: Filters,
        device: str | torch.device,
        source: Source = in_passes,
        narrows: bool = True,
    ) -> None:
        self.rows = Rows.of([SamplingParams()] * n_rows, [0] * n_rows, device, filters, source)
        self._filters, self._narrows = filters, narrows
        self._state = torch.zeros(2, n_rows, dtype=torch.int64, device=device)
        self._longest = 0

    @property
    def lengths(self) -> Tensor:
        """The position of each row's last token: how many tokens of it are committed to the target's cache."""
        return self._state[0]

    @property
    def current(self) -> Tensor:
        """Each row's last token, which no cache holds yet."""
        return self._state[1]

    def extent(self, gamma: int) -> int | None:
        """What all positions of a round of `gamma` drafts are below; None where rounds keep the cache's whole shape."""
        return self._longest + gamma + 1 if self._narrows else None

    def set_rows(self, sampling: Sequence[SamplingParams], requests: Sequence[int]) -> None:
        self.rows.copy_(Rows.of(sampling, requests, self._state.device, self._filters))

    def set_state(self, lengths: Sequence[int], current: Sequence[int]) -> None:
        self._state.copy_(torch.tensor([lengths, current]))
        self._longest = max(lengths)
