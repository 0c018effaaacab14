"""What heads share: the target's hidden states of each row's last verification, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner import ModelRunner


class ObservedStates:
    """What drafters keep that go on from the target's hidden states: of each row, of `gamma + 1` tokens from a position
    on, the states, `width` wide, and the token that follows each. Those behind the row's end mean nothing."""

    def __init__(self, runner: ModelRunner, gamma: int, width: int, layers: tuple[int, ...] = ()) -> None:
        self._target, self.layers = runner, layers
        n_rows, device = runner.max_batch, runner.device
        self._states = torch.zeros(n_rows, gamma + 1, width, dtype=runner.model.dtype, device=device)
        self._following = torch.zeros(n_rows, gamma + 1, dtype=torch.int64, device=device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def observe(self, batch: Batch, block: Tensor, states: Tensor) -> None:
        """What a verification of `block [B, T]` behind the batch's lengths left: `states [B, T, ...]`, the inputs of
        `layers`, of none its last ones (see `Transformer.hidden_states`)."""
        n_token = block.shape[1]
        self._states[batch.rows, :n_token] = states
        self._following[batch.rows, : n_token - 1] = block[:, 1:]
        self._start[batch.rows] = batch.lengths

    def begin(self, row: int, text: Sequence[int]) -> None:
        """The target's row holds this text, whose last token runs once more for its state."""
        last = len(text) - 1
        self._start[row] = last
        states, _ = self._target.recompute(row, text, range(last, last + 1), self.layers)
        self._states[row, 0] = states[0, -1]

    def of(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each row: its states `[B, gamma + 1, width]`, the tokens that follow them and their positions, both
        `[B, gamma + 1]`, and the index `[B, 1]` of the last accepted one, which the batch's current token follows."""
        start, n_state = self._start[batch.rows, None], self._states.shape[1]
        last = (batch.lengths[:, None] - 1 - start).clamp(min=0, max=n_state - 1)
        following = self._following[batch.rows].scatter(1, last, batch.current[:, None])
        return self._states[batch.rows], following, start + torch.arange(n_state, device=start.device), last
