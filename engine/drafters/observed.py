"""What heads share: the target's hidden states of each row's last verification, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.drafters.config import DrafterConfig

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import Batch
    from engine.runner import ModelRunner
    from models.checkpoints.model_source import ModelSource


class ObservedStates:
    """What drafters keep that go on from the target's hidden states: of each row, of `gamma + 1` tokens from a position
    on, the states, `width` wide, and the token that follows each. Those behind the row's end mean nothing.
    """

    def __init__(self, runner: ModelRunner, gamma: int, width: int, layers: tuple[int, ...] = ()) -> None:
        self._target, self.layers = runner, layers
        n_rows, device = runner.max_batch, runner.device
        self._states = torch.zeros(n_rows, gamma + 1, width, dtype=runner.model.dtype, device=device)
        self._following = torch.zeros(n_rows, gamma + 1, dtype=torch.int64, device=device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def observe(self, batch: Batch, block: Tensor, states: Tensor) -> None:
        n_token = block.shape[1]
        self._states[batch.rows, :n_token] = states
        self._following[batch.rows, : n_token - 1] = block[:, 1:]
        self._start[batch.rows] = batch.lengths

    def begin(self, row: int, text: Sequence[int]) -> None:
        """The target's row holds this text, whose last token runs once more for its state."""
        last = len(text) - 1
        self._start[row] = last
        self._states[row, 0] = self._target.states_again(row, text, range(last, last + 1), self.layers)[0, -1]

    def of(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each row: its states `[B, gamma + 1, width]`, the tokens that follow them and their positions, both
        `[B, gamma + 1]`, and the index `[B, 1]` of the last accepted one, which the batch's current token follows."""
        start, n_state = self._start[batch.rows, None], self._states.shape[1]
        last = (batch.lengths[:, None] - 1 - start).clamp(min=0, max=n_state - 1)
        following = self._following[batch.rows].scatter(1, last, batch.current[:, None])
        return self._states[batch.rows], following, start + torch.arange(n_state, device=start.device), last


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Options of a head that was trained for the target."""

    draft_model: str
    """the draft's converted checkpoint; of medusa and eagle: the head as it was published, a folder or its weights"""

    def find_source(self, target: ModelSource, load_format: str, verify: bool) -> ModelSource:
        from models.heads.loading import find_head

        return find_head(self.draft_model, self.name, target.config)
