"""HiddenStateBuffer: the target's hidden states at each row's last tokens, which trained heads continue."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner import ModelRunner

# Tokens of a row whose states are kept, and tokens of the longest block of another drafter, which must not overwrite
# them.
KEPT, LONGEST_BLOCK = 64, 32


def n_slots(gamma: int) -> int:
    """Return the number of slots of a row, for a head that drafts `gamma` tokens next to other drafters."""
    return KEPT + max(LONGEST_BLOCK, gamma + 1)


class HiddenStateBuffer:
    """Target states `[width]` of each row's last KEPT tokens, and the token that follows each.

    Every verification of a decode writes those of its block, whoever drafted it: position p has slot p modulo
    `n_slots`. Tensors stay in place, for captured rounds. gamma: the most tokens that the head drafts. layers: see
    `Transformer.hidden_states`; empty: the last hidden state.
    """

    def __init__(self, runner: ModelRunner, gamma: int, width: int, layers: tuple[int, ...] = ()) -> None:
        self._target, self._gamma, self.layers = runner, gamma, layers
        n_rows, self._n_slots, device = runner.max_batch, n_slots(gamma), runner.device
        self._states = torch.zeros(n_rows, self._n_slots, width, dtype=runner.model.dtype, device=device)
        self._following = torch.zeros(n_rows, self._n_slots, dtype=torch.int64, device=device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self._n_verified = gamma + 1  # tokens of the last verification, at most gamma + 1

    @property
    def most_drafts(self) -> int:
        """The most tokens that any drafter may draft in a round, so that the states of KEPT tokens stay."""
        return self._n_slots - KEPT - 1

    def keep(self, batch: Batch, block: Tensor, hidden: Tensor, inputs: Mapping[int, Tensor]) -> None:
        """Keep the states of a verified `block [B, T]`: its last `hidden [B, T, dim]` states, or the `inputs [B, T,
        dim]` of layers."""
        slots, rows = batch.positions(block.shape[1]) % self._n_slots, batch.rows[:, None]
        self._states[rows, slots] = torch.cat([inputs[layer] for layer in self.layers], -1) if self.layers else hidden
        self._following[rows, slots[:, :-1]] = block[:, 1:]
        self._start[batch.rows] = batch.lengths
        self._n_verified = min(block.shape[1], self._gamma + 1)

    def begin(self, row: int, text: Sequence[int]) -> None:
        """Start a row of the target that holds `text`; the last token runs again for its state."""
        last = len(text) - 1
        self._start[row] = last
        states, _ = self._target.recompute(row, text, range(last, last + 1), self.layers)
        self._states[row, last % self._n_slots] = states[0, -1]

    def kept(self, verified: range) -> range:
        """Return the positions whose states are in their slots, of those that verifications have run."""
        return range(max(verified.start, verified.stop - KEPT), verified.stop)

    def of_row(self, row: int, at: range) -> Tensor:
        """Return the states `[1, n, width]` at `n` positions of a row that are kept."""
        return self._states[row : row + 1, [p % self._n_slots for p in at]]

    def of_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the last verification's states `[B, T, width]`, the tokens that follow them and their positions, both
        `[B, T]`, and the index `[B, 1]` of the last accepted state, which the current token follows. States after it
        are undefined. T is the verification's, at most gamma + 1; where rounds keep their shape, it is gamma + 1."""
        n_token, last = self._n_verified if batch.narrows else self._gamma + 1, batch.lengths - 1
        # Another drafter may have drafted more than gamma. A row that idles may have observed another text before.
        start = torch.minimum(torch.maximum(self._start[batch.rows], last - self._gamma), last).clamp(min=0)[:, None]
        index = (last[:, None] - start).clamp(min=0, max=n_token - 1)
        positions = start + torch.arange(n_token, device=start.device)
        slots, rows = positions % self._n_slots, batch.rows[:, None]
        following = self._following[rows, slots].scatter(1, index, batch.current[:, None])
        return self._states[rows, slots], following, positions, index
