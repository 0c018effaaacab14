"""ObservedStates: the target's hidden states of each row's last verification, which trained heads continue."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner import ModelRunner


class ObservedStates:
    """Target states `[width]` at `gamma + 1` positions of each row, and the token that follows each.

    States behind a row's end are undefined. Tensors stay in place, for captured rounds. layers: see
    `Transformer.hidden_states`; empty: the last hidden state.
    """

    def __init__(self, runner: ModelRunner, gamma: int, width: int, layers: tuple[int, ...] = ()) -> None:
        self._target, self.layers = runner, layers
        n_rows, device = runner.max_batch, runner.device
        self._states = torch.zeros(n_rows, gamma + 1, width, dtype=runner.model.dtype, device=device)
        self._following = torch.zeros(n_rows, gamma + 1, dtype=torch.int64, device=device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def verify(self, target: ModelRunner, batch: Batch, block: Tensor, gamma: int) -> Tensor:
        """Verify `block [B, T]` (see `Drafter.verify`), and keep its states."""
        n_token, cache = block.shape[1], batch.view_of(target.cache, gamma)
        hidden, states = target.model.hidden_states(block, batch.positions(n_token), cache, self.layers)
        self._states[batch.rows, :n_token] = states
        self._following[batch.rows, : n_token - 1] = block[:, 1:]
        self._start[batch.rows] = batch.lengths
        return target.model.logits(hidden)

    def begin(self, row: int, text: Sequence[int]) -> None:
        """Start a row of the target that holds `text`; the last token runs again for its state."""
        last = len(text) - 1
        self._start[row] = last
        states, _ = self._target.recompute(row, text, range(last, last + 1), self.layers)
        self._states[row, 0] = states[0, -1]

    def of_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the states `[B, gamma + 1, width]`, the tokens that follow them and their positions, both
        `[B, gamma + 1]`, and the index `[B, 1]` of the last accepted state, which the current token follows."""
        # A row that idles may have observed a longer text before.
        start = torch.minimum(self._start[batch.rows], batch.lengths - 1).clamp(min=0)[:, None]
        n_state = self._states.shape[1]
        last = (batch.lengths[:, None] - 1 - start).clamp(min=0, max=n_state - 1)
        following = self._following[batch.rows].scatter(1, last, batch.current[:, None])
        return self._states[batch.rows], following, start + torch.arange(n_state, device=start.device), last
