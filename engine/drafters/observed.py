"""ObservedStates: the target's hidden states at each row's last tokens, which trained heads continue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.runner import ModelRunner
from kv_cache import KVCache, WriteThroughKVCache

# Tokens of a row whose states are kept; the target recomputes those of a drafter that missed more.
KEPT = 64


def n_slots(gamma: int) -> int:
    """Return the number of states of a row, for rounds of at most `gamma` drafts."""
    return KEPT + gamma + 1


class ObservedStates:
    """Target states `[width]` of each row's last KEPT tokens, and the token that follows each.

    Verifications write them, whoever drafted: the state at position p is in slot p modulo `n_slots`. Tensors stay in
    place, for captured rounds. gamma: the most drafts of a round. layers: see `Transformer.hidden_states`;
    empty: the last hidden state.
    """

    def __init__(self, runner: ModelRunner, gamma: int, width: int, layers: tuple[int, ...] = ()) -> None:
        self._target, self._gamma, self.layers = runner, gamma, layers
        n_rows, self._n_slots, device = runner.max_batch, n_slots(gamma), runner.device
        self._states = torch.zeros(n_rows, self._n_slots, width, dtype=runner.model.dtype, device=device)
        self._following = torch.zeros(n_rows, self._n_slots, dtype=torch.int64, device=device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def keep(self, batch: Batch, block: Tensor, states: Tensor) -> None:
        """Keep the `states [B, T, width]` of a verified `block [B, T]`."""
        slots = batch.positions(block.shape[1]) % self._n_slots
        self._states[batch.rows[:, None], slots] = states
        self._following[batch.rows[:, None], slots[:, :-1]] = block[:, 1:]
        self._start[batch.rows] = batch.lengths

    def begin(self, row: int, text: Sequence[int]) -> None:
        """Start a row of the target that holds `text`; the last token runs again for its state."""
        last = len(text) - 1
        self._start[row] = last
        states, _ = self._target.recompute(row, text, range(last, last + 1), self.layers)
        self._states[row, last % self._n_slots] = states[0, -1]

    def kept(self, verified: range) -> range:
        """Return which of a row's positions that verifications have run still have states."""
        return range(max(verified.start, verified.stop - KEPT), verified.stop)

    def of_row(self, row: int, at: range) -> Tensor:
        """Return the states `[1, n, width]` at `n` positions of a row that are kept."""
        return self._states[row : row + 1, [p % self._n_slots for p in at]]

    def of_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the last verification's states `[B, gamma + 1, width]`, the tokens that follow them and their
        positions, both `[B, gamma + 1]`, and the index `[B, 1]` of the last accepted state, which the current token
        follows. States behind it are undefined."""
        # Another drafter may have drafted more than gamma. A row that idles may have observed a longer text before.
        last = batch.lengths - 1
        start = torch.minimum(torch.maximum(self._start[batch.rows], last - self._gamma), last).clamp(min=0)[:, None]
        index = (last[:, None] - start).clamp(min=0)
        positions = start + torch.arange(self._gamma + 1, device=start.device)
        slots, rows = positions % self._n_slots, batch.rows[:, None]
        following = self._following[rows, slots].scatter(1, index, batch.current[:, None])
        return self._states[rows, slots], following, positions, index


def verify(
    target: ModelRunner,
    batch: Batch,
    block: Tensor,
    view: KVCache | WriteThroughKVCache,
    observers: Sequence[ObservedStates],
) -> Tensor:
    """Run the target over `block [B, T]`, each row's current token and its drafts, and let `observers` keep its states;
    return the logits `[B, T, V]`. view: the batch's rows of the target's cache."""
    positions = batch.positions(block.shape[1])
    if not observers:
        return target.step(block, positions, view)
    layers = sorted({layer for observer in observers for layer in observer.layers})
    hidden, states = target.model.hidden_states(block, positions, view, layers)
    of_layer = dict(zip(layers, states.chunk(max(1, len(layers)), dim=-1), strict=False))
    for observer in observers:
        observed = [of_layer[layer] for layer in observer.layers]
        observer.keep(batch, block, torch.cat(observed, dim=-1) if observed else hidden)
    return target.model.logits(hidden)
