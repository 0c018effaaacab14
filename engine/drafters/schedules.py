"""Schedules: how many of a round's tokens each row drafts; fewer rounds of drafts that would be rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from engine.modes import Drafts

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import Batch

# Of transformers' `assistant_confidence_threshold`, which it also begins with where it adapts it.
THRESHOLD = 0.4
# An adapted threshold is one of so many steps, once more drafts than these were verified, of both outcomes.
N_STEPS, FEWEST_SEEN = 20, 5
# What an accepted draft that would have been left out costs, in rejected ones that would have been drafted.
MISSED = 3


class Schedule:
    """Constant: every row drafts as many tokens as its round. Others derive from it.

    A bound, `[B]` int64, is the most drafts that each row means; of a row that no request decodes it is 0. It may
    depend on what was emitted, on drafts before the one that it leaves out, and on that one's distribution, never on
    that one itself (docs/lossless.md). Nothing reads a value on the host but `n_columns`, where no round is captured.
    """

    varies = False

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        """What they are before anything is drafted."""
        return gamma * batch.busy

    def shorten(self, bounds: Tensor, i: int, logits: Tensor, token: Tensor, batch: Batch) -> Tensor:
        """What they are behind the i-th draft, `token [B]` of `logits [B, V]`; only the rank that decides is asked."""
        return bounds

    def n_columns(self, bounds: Tensor, batch: Batch, gamma: int) -> int:
        """How many drafts a row of the round has, those that are not meant included."""
        return int(bounds.max()) if self.varies and batch.narrows else gamma

    def note(self, drafts: Drafts, batch: Batch) -> None:
        """The round's drafts, before they are verified."""

    def observe(self, batch: Batch) -> None:
        """The round is over: `batch.lengths` and `batch.current` are what it left of each row."""


class Varying(Schedule):
    """What schedules share that learn from what was accepted, row by row."""

    varies = True

    def note(self, drafts: Drafts, batch: Batch) -> None:
        assert drafts.lengths is not None, "a schedule that varies has bounds"
        self._begun, self._tokens, self._meant = batch.lengths.clone(), drafts.tokens, drafts.lengths

    def verified(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How many drafts of each row were verified, and how many of those accepted; behind the end of a row that was
        cut by a stop token or its limit, none were. A token that replaces a rejected draft is always another one."""
        n_emitted = batch.lengths - self._begun
        n_verified = torch.minimum(n_emitted, self._meant)
        padded = torch.nn.functional.pad(self._tokens, (1, 0))  # so that there is an entry of 0 drafts
        last = padded.gather(1, n_verified[:, None]).squeeze(1)
        rejected = (n_verified > 0) & (n_verified == n_emitted) & (last != batch.current)
        return n_verified, n_verified - rejected.long()


class Heuristic(Varying):
    """A row drafts two tokens more where all of its last were accepted, one less where not: from 1 to `gamma`, at first
    all (`num_assistant_tokens_schedule="heuristic"` of transformers, generation/candidate_generator.py). What a row of
    the cache came to is where its next request begins.
    """

    def __init__(self, gamma: int, n_rows: int, device: torch.device) -> None:
        self._gamma, self._limits = gamma, torch.full((n_rows,), gamma, device=device)

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        return torch.minimum(super().bounds(batch, gamma), self._limits[batch.rows])

    def observe(self, batch: Batch) -> None:
        n_verified, n_accepted = self.verified(batch)
        limits = self._limits[batch.rows]
        changed = torch.where(n_accepted < n_verified, limits - 1, limits + 2).clamp(1, self._gamma)
        self._limits[batch.rows] = torch.where(n_verified > 0, changed, limits)


class Confidence(Varying):
    """A row stops behind a draft whose own probability is below the threshold (`assistant_confidence_threshold` of
    transformers), and before one whose distribution has no probability of `p_min` (p-min of llama.cpp's drafts).

    Probabilities are the draft's at the row's temperature, 1 where it is greedy, before top-k and top-p. A threshold of
    "auto" is, of each row of the cache, the one that divides its verified drafts best: the least share of rejected ones
    that it lets pass plus three times that of accepted ones that it does not, as transformers has it.
    """

    def __init__(self, threshold: float | Literal["auto"], p_min: float, n_rows: int, device: torch.device) -> None:
        self._adapts, self._p_min = threshold == "auto", p_min
        first = THRESHOLD if threshold == "auto" else threshold
        self._thresholds = torch.full((n_rows,), first, dtype=torch.float64, device=device)
        # Verified drafts of each row by outcome, rejected or accepted, and probability.
        self._seen = torch.zeros(n_rows, 2, N_STEPS, device=device)
        self._sure: list[Tensor] = []

    def bounds(self, batch: Batch, gamma: int) -> Tensor:
        self._sure = []
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

    def observe(self, batch: Batch) -> None:
        if not self._adapts or not self._sure:  # ranks that do not decide have seen no probability
            return
        sure = torch.stack(self._sure, dim=1)[..., None]
        column = torch.arange(sure.shape[1], device=sure.device)
        n_verified, n_accepted = (n[:, None] for n in self.verified(batch))
        outcomes = torch.stack([(column >= n_accepted) & (column < n_verified), column < n_accepted], dim=1)
        steps = torch.arange(N_STEPS, device=sure.device)
        step = (sure * N_STEPS).long().clamp(0, N_STEPS - 1) == steps
        seen = self._seen[batch.rows] + (outcomes[..., None] & step[:, None]).sum(dim=2)
        self._seen[batch.rows] = seen
        n_seen = seen.sum(dim=2)
        below = (seen.cumsum(dim=2) - seen) / n_seen[..., None]
        best = (1 - below[:, 0] + MISSED * below[:, 1]).argmin(dim=1).double() / N_STEPS
        enough = (n_seen > 0).all(dim=1) & (n_seen.sum(dim=1) > FEWEST_SEEN)
        self._thresholds[batch.rows] = torch.where(enough, best, self._thresholds[batch.rows])
