"""The three verification modes: how a round's drafts are drawn, and how the target verifies them.

A mode joins the pure functions of `verification` with the distribution of each row and with random numbers
keyed by what they are for. The first token after a prefill is that of a round without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.noise import Stream, gumbel, uniform
from engine.sampling import SamplingParams, greedy
from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection
from models import Transformer

GREEDY = "greedy"
MODES = ("auto", GREEDY, "rejection", "coupled")


class Drafts(NamedTuple):
    """A round's proposals.

    tokens: `[B, g]` int64. probs: `[B, g, V]`, the distributions that they were drawn from, where rejection needs
    them; None from a drafter without probabilities. lengths: `[B]` int64, how many of each row's tokens count; None:
    all.
    """

    tokens: Tensor
    probs: Tensor | None = None
    lengths: Tensor | None = None


class Greedy:
    """Draws and verifies by argmax."""

    verified: Tensor | None = None

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Greedy:
        """Return the verification of the `i`-th inner round, whose drafts follow `ahead [B]` tokens of this round. Its
        `verified` are then the distributions `[B, g + 1, V]` that tokens there are drawn from, where the outer
        verification needs them."""
        return self

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Draw the i-th draft `[B]` by a draft model's `logits [B, V]`; return its distribution `[B, V]` if needed."""
        return greedy(logits), None

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        """Return the verdict of the target's `logits [B, g + 1, V]`."""
        return verify_greedy(drafts.tokens, logits, drafts.lengths)


class Rejection:
    """Drafts, accepts and resamples by a stream of numbers each.

    What a round drew behind its first rejection is drawn anew, by the numbers of another index: what it drew may have
    decided how far it went, and so what a draft's cache still holds. Numbers of the `i`-th inner round are keyed by
    where the outer round began, and by `i`: by nothing that two inner rounds may share.
    """

    verified: Tensor | None = None

    def __init__(self, batch: Batch, i: int | None = None) -> None:
        self._batch, self._is_inner = batch, i is not None
        self._purpose = 0 if i is None else len(Stream) * (1 + i) << 16

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Rejection:
        return Rejection(self._batch, i)

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor]:
        probs = self._batch.distribution.probs(logits)
        noise = self._gumbel(self._batch.lengths + 1 + i, Stream.DRAFT + len(Stream) * i, probs)
        return (probs.log() + noise).argmax(dim=-1), probs

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        probs = self._batch.distribution.probs(logits)
        self.verified = probs if self._is_inner else None
        accept = self._accept(drafts.tokens.shape[1])
        # A row resamples once a round, at a position not known yet; its rounds start at different positions.
        resample = self._gumbel(self._batch.lengths + 1, Stream.RESAMPLE, probs)
        return verify_rejection(drafts.tokens, drafts.probs, probs, accept, resample, drafts.lengths)

    def _accept(self, n_drafts: int) -> Tensor:
        batch = self._batch
        if self._is_inner:
            return uniform(batch.seeds, batch.requests, batch.lengths + 1, Stream.ACCEPT + self._purpose, n_drafts)
        seed, request = batch.seeds[:, None], batch.requests[:, None]
        return uniform(seed, request, batch.positions(n_drafts) + 1, Stream.ACCEPT).squeeze(-1)

    def _gumbel(self, positions: Tensor, stream: int, like: Tensor) -> Tensor:
        batch, stream = self._batch, stream + self._purpose
        return gumbel(batch.seeds, batch.requests, positions, stream, like.shape[-1], like.dtype)


class Coupled:
    """Draws drafts and the target's tokens by one Gumbel vector per position, computed once for both: with the first
    draft, or for verifying where nothing was drawn; a rank that does not decide never needs it."""

    verified: Tensor | None = None

    def __init__(self, batch: Batch, noise: Callable[[], Tensor]) -> None:
        """noise: computes `[B, gamma + 1, V]`."""
        self._batch, self._noise = batch, noise
        self._drawn_with: Tensor | None = None

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Coupled:
        """Share this round's noise, from each row's place on; what lies beyond the round is dropped there."""
        places = ahead[:, None] + torch.arange(n_drafts + 1, device=ahead.device)

        def noise() -> Tensor:
            shared = self.shared()
            row = torch.arange(len(shared), device=shared.device)[:, None]
            return shared[row, places.clamp(max=shared.shape[1] - 1)]

        return Coupled(self._batch, noise)

    def shared(self) -> Tensor:
        """Return the noise of the drafted round, which all its inner rounds share."""
        if self._drawn_with is None:
            self._drawn_with = self._noise()
        return self._drawn_with

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, None]:
        if i == 0 or self._drawn_with is None:
            self._drawn_with = self._noise()
        return (self._batch.distribution.logprobs(logits) + self._drawn_with[:, i]).argmax(dim=-1), None

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        noise = self._noise() if self._drawn_with is None else self._drawn_with
        logprobs = self._batch.distribution.logprobs(logits)
        return verify_coupled(drafts.tokens, logprobs, noise[:, : logits.shape[1]], drafts.lengths)


Verification: TypeAlias = Greedy | Rejection | Coupled


def resolve_mode(mode: str, params: Sequence[SamplingParams]) -> str:
    """Return the mode; `auto` is greedy if every request is, else rejection. Errors: ConfigError if the mode is unknown
    or cannot verify those requests."""
    where = f"verification ({flag('verification')})"
    if mode not in MODES:
        required = ", ".join(MODES[:-1]) + f" or {MODES[-1]}"
        raise ConfigError("unknown verification mode", where, mode, required, "use auto")
    sampled = [row.temperature for row in params if not row.greedy]
    if mode == GREEDY and sampled:
        what, seen = "greedy verification cannot verify samples", f"greedy at temperature {sampled[0]}"
        where, fix = f"{where} and temperature ({flag('temperature')})", "or the rejection or coupled mode"
        raise ConfigError(what, where, seen, "temperature 0", f"use temperature 0, {fix}")
    return mode if mode != "auto" else "rejection" if sampled else GREEDY


def verification_in(mode: str, batch: Batch, gamma: int, model: Transformer) -> Verification:
    """Return the verification of at most `gamma` drafts behind the batch's current tokens, by `model`'s logits."""
    if mode == GREEDY:
        return Greedy()
    if mode == "rejection":
        return Rejection(batch)

    def noise() -> Tensor:
        keys, dtype = (batch.seeds[:, None], batch.requests[:, None]), torch.promote_types(model.dtype, torch.float32)
        return gumbel(*keys, batch.positions(gamma + 1) + 1, Stream.COUPLED, model.config.vocab_size, dtype)

    return Coupled(batch, noise)
