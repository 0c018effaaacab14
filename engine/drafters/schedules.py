"""Schedules limit how many of a round's tokens each row drafts, where more would be rejected."""

from typing import Any, Literal

import torch
from torch import Tensor

from engine.batch import Batch
from engine.modes import Drafts

THRESHOLD = 0.4  # as in transformers
# An adapted threshold is a multiple of 1 / N_STEPS, chosen once more than FEWEST_SEEN drafts were verified.
FEWEST_SEEN, N_STEPS = 5, 20
OF_CONFIDENCE = ("confidence_threshold", "p_min")


class Schedule:
    """Lets every row draft all tokens of its round; other schedules derive from this.

    Bounds `[B]` int64 limit the number of drafts of each row: to 0 where no request decodes it. A bound may depend on
    emitted tokens, on the drafts within it and on the distribution of the first draft that it leaves out, never on that
    draft itself (docs/lossless.md).

    of_round: the tensors of a round's drafts that `observe` reads.
    """

    varies = False
    of_round: tuple[Any, ...] = ()

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        """Return the bounds before anything is drafted."""
        return gamma * (1 - batch.idle)

    def shorten(self, bounds: Tensor, i: int, logits: Tensor, token: Tensor, batch: Batch) -> Tensor:
        """Return the bounds after the i-th draft, `token [B]` of `logits [B, V]`. Runs on the leader only."""
        return bounds

    def n_columns(self, bounds: Tensor, batch: Batch, gamma: int) -> int:
        """Return the number of draft columns: gamma where rounds keep their shape."""
        return int(bounds.max()) if self.varies and batch.narrows else gamma

    def cut(self, drafts: Drafts, batch: Batch) -> Drafts:
        """Cut drafts to the longest row's length, and keep them for `verified`."""
        tokens, probs, lengths = drafts
        if not self.varies or lengths is None:
            return drafts
        n = self.n_columns(lengths, batch, tokens.shape[1])
        self.of_round = batch.lengths.clone(), tokens[:, :n], lengths
        return Drafts(tokens[:, :n], None if probs is None else probs[:, :n], lengths)

    def verified(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return how many drafts of each row were verified, and how many of these were accepted; drafts after a stop
        token or a limit count as neither. A rejected draft is always replaced by another token."""
        begun, tokens, drafted, *_ = self.of_round
        n_emitted = batch.lengths - begun
        n_verified = torch.minimum(n_emitted, drafted)
        padded = torch.nn.functional.pad(tokens, (1, 0))  # there may be no column
        last = padded.gather(1, n_verified[:, None]).squeeze(1)
        rejected = (n_verified > 0) & (n_verified == n_emitted) & (last != batch.current)
        return n_verified, n_verified - rejected.long()

    def observe(self, batch: Batch) -> None:
        """Learn from a round that is over; `batch.lengths` and `batch.current` are those after it."""


class Heuristic(Schedule):
    """Lets a row draft two tokens more if all its last drafts were accepted, else a token less, from 1 to `gamma`
    (`num_assistant_tokens_schedule` of transformers, generation/candidate_generator.py). A row begins with gamma; its
    next request begins with the bound that the last request ended with."""

    varies = True

    def __init__(self, gamma: int, n_rows: int, device: torch.device) -> None:
        self._gamma, self._limits = gamma, torch.full((n_rows,), gamma, device=device)

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        return torch.minimum(super().bounds(batch, gamma), self._limits[batch.rows])

    def observe(self, batch: Batch) -> None:
        (n_verified, n_accepted), limits = self.verified(batch), self._limits[batch.rows]
        changed = torch.where(n_accepted < n_verified, limits - 1, limits + 2).clamp(1, self._gamma)
        self._limits[batch.rows] = torch.where(n_verified > 0, changed, limits)


class Confidence(Schedule):
    """Stops a row after a draft whose probability is below the threshold (`assistant_confidence_threshold` of
    transformers), and before a draft whose most probable token is below `p_min` (p-min of llama.cpp).

    Probabilities are the draft model's at the row's temperature (1 where it is greedy), before top-k and top-p. A
    threshold of "auto" best divides the verified drafts of a cache row: it has the least share of rejected drafts that
    pass plus three times the share of accepted drafts that do not (the rule of transformers, in steps).
    """

    varies = True

    def __init__(self, threshold: float | Literal["auto"], p_min: float, n_rows: int, device: torch.device) -> None:
        self._adapts, self._p_min = threshold == "auto", p_min
        self._thresholds = torch.full((n_rows,), THRESHOLD if threshold == "auto" else threshold, device=device)
        # By row, rejected or accepted, and probability: the number of verified drafts.
        self._seen = torch.zeros(n_rows, 2, N_STEPS, device=device)
        self._sure: list[Tensor] = []

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        self._sure = []  # there may be no draft of a model
        return super().bounds(batch, gamma)

    def shorten(self, bounds: Tensor, i: int, logits: Tensor, token: Tensor, batch: Batch) -> Tensor:
        temperature = batch.distribution.temperature
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = scaled / (temperature + (temperature == 0)).to(scaled.dtype)[:, None]
        mass = scaled.logsumexp(dim=-1)
        sure, most = (scaled.gather(1, token[:, None]).squeeze(1) - mass).exp(), (scaled.amax(dim=-1) - mass).exp()
        self._sure.append(sure)
        bounds = torch.where(most < self._p_min, bounds.clamp(max=i), bounds)
        return torch.where(sure < self._thresholds[batch.rows], bounds.clamp(max=i + 1), bounds)

    def cut(self, drafts: Drafts, batch: Batch) -> Drafts:
        drafts = super().cut(drafts, batch)
        self.of_round = *self.of_round[:3], self._sure
        return drafts

    def observe(self, batch: Batch) -> None:
        if not self._adapts or not self._sure:  # ranks that do not decide have seen no probability
            return
        sure, (n_verified, n_accepted) = torch.stack(self._sure, dim=1), (n[:, None] for n in self.verified(batch))
        column, steps = (torch.arange(n, device=sure.device) for n in (sure.shape[1], N_STEPS))
        outcomes = torch.stack([(n_accepted <= column) & (column < n_verified), column < n_accepted], dim=1)
        step = (sure * N_STEPS).long().clamp(0, N_STEPS - 1)[..., None] == steps
        self._seen[batch.rows] += (outcomes[..., None] & step[:, None]).sum(dim=2)
        seen = self._seen[batch.rows]
        n_seen = seen.sum(dim=2)
        below = (seen.cumsum(dim=2) - seen) / n_seen[..., None]
        best = (1 - below[:, 0] + 3 * below[:, 1]).argmin(dim=1) / N_STEPS
        enough = (n_seen > 0).all(dim=1) & (n_seen.sum(dim=1) > FEWEST_SEEN)
        self._thresholds[batch.rows] = torch.where(enough, best, self._thresholds[batch.rows])
