"""The three verification modes: how a round's drafts are drawn, and how the target verifies them.

A mode joins the pure functions of `verification` with the distribution of each row and with random numbers, which are
keyed by their purpose. The first token after a prefill is that of a round without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import flag, refuse
from engine.batch import Batch
from engine.sampling.distribution import SamplingParams, argmax
from engine.sampling.noise import Stream, gumbel, uniform
from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection
from models import Transformer

GREEDY = "greedy"
MODES = ("auto", GREEDY, "rejection", "coupled")


class Drafts(NamedTuple):
    """The draft tokens of a round.

    tokens: `[B, g]` int64, ids of the vocabulary in every column. probs: `[B, g, V]`, the distributions that they were
    drawn from, where rejection needs them; None from a drafter without probabilities. lengths: `[B]` int64, each row's
    number of drafts; None: g.
    """

    tokens: Tensor
    probs: Tensor | None = None
    lengths: Tensor | None = None


class Verification(ABC):
    """Draws the drafts of a round in a mode, and verifies them.

    keeps_probs: `draw` returns every draft's distribution, also where the mode needs none. masks_drafts: the masks of
    grammars follow the drafts, which are read from the device. guesses: tokens `[B, g]`, and how many of these `[B]`
    each row drafts with certainty, in the place of draws. verified: after `verify` in an inner round, where the
    outer verification needs them, the distributions `[B, g + 1, V]` that the inner round draws tokens from.
    """

    keeps_probs = masks_drafts = False
    guesses: tuple[Tensor, Tensor] | None = None
    verified: Tensor | None = None

    def __init__(self, batch: Batch) -> None:
        self._batch, self._tokens = batch, list[Tensor]()

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Draw the i-th draft `[B]` by a draft model's `logits [B, V]`; return its distribution `[B, V]` if needed."""
        if self.masks_drafts:
            self._batch.masks.fill(torch.stack(self._tokens, dim=1).tolist() if i else [()] * len(logits))
        logits = self._batch.processed_draft(logits, i)
        token, probs = self._draw(logits, i)
        if self.keeps_probs and probs is None:
            probs = self.logprobs(logits).exp()
        if self.guesses is not None:
            guess, is_guessed = self.guesses[0][:, i], i < self.guesses[1]
            token = torch.where(is_guessed, guess, token)
            if probs is not None:
                certain = torch.zeros_like(probs).scatter_(1, token[:, None], 1)
                probs = torch.where(is_guessed[:, None], certain, probs)
        if self.masks_drafts:
            self._tokens.append(token)
        return token, probs

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of each row's distribution, by processed `logits [B, ..., V]`."""
        return self._batch.distribution.logprobs(logits)

    @abstractmethod
    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Verification:
        """Return the verification of the `i`-th inner round, whose drafts follow `ahead [B]` tokens of this round, and
        are drawn without masks."""

    @abstractmethod
    def _draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Draw the i-th draft by processed logits."""

    @abstractmethod
    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        """Return the verdict of the target's `logits [B, g + 1, V]`."""


class Greedy(Verification):
    """Draws and verifies by argmax."""

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Greedy:
        return Greedy(self._batch)

    def _draw(self, logits: Tensor, i: int) -> tuple[Tensor, None]:
        return argmax(logits), None

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the model, since a row's distribution is a point."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        return verify_greedy(drafts.tokens, self._batch.processed(logits, drafts.tokens), drafts.lengths)


class Rejection(Verification):
    """Drafts, accepts and resamples by separate streams of random numbers.

    The numbers of a draft are keyed by its position and by its index in the round. So a position after a rejection is
    drafted again by other numbers: those of the rejected draft may have decided how far the round went, and so which
    entries a draft's cache has. The numbers of the `i`-th inner round are keyed by the outer round's first position and
    by `i`, so no two inner rounds share any.
    """

    def __init__(self, batch: Batch, i: int | None = None) -> None:
        super().__init__(batch)
        self._is_inner = i is not None
        self._purpose = 0 if i is None else len(Stream) * (1 + i) << 16

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Rejection:
        return Rejection(self._batch, i)

    def _draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor]:
        probs = self._batch.distribution.probs(logits)
        noise = self._gumbel(self._batch.lengths + 1 + i, Stream.DRAFT + len(Stream) * i, probs)
        return argmax(probs.log() + noise), probs

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        probs = self._batch.distribution.probs(self._batch.processed(logits, drafts.tokens))
        self.verified = probs if self._is_inner else None
        accept = self._accept(drafts.tokens.shape[1])
        # Keyed by the round's start, since the position is not known yet: a row resamples once a round.
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


class Coupled(Verification):
    """Draws drafts and the target's tokens by the same Gumbel vector per position, computed with the first draft, or
    for verifying where nothing was drawn. Ranks that do not decide never compute it."""

    def __init__(self, batch: Batch, noise: Callable[[], Tensor]) -> None:
        """noise: computes `[B, gamma + 1, V]`."""
        super().__init__(batch)
        self._noise = noise
        self._drawn_with: Tensor | None = None

    def inner(self, ahead: Tensor, i: int, n_drafts: int) -> Coupled:
        """Share this round's noise from each row's position on; drafts beyond the round are dropped."""
        index = ahead[:, None] + torch.arange(n_drafts + 1, device=ahead.device)

        def noise() -> Tensor:
            shared, row = self.shared(), torch.arange(len(index), device=index.device)[:, None]
            return shared[row, index.clamp(max=shared.shape[1] - 1)]

        return Coupled(self._batch, noise)

    def shared(self) -> Tensor:
        """Return the noise that all draws of this round share, and those of its inner rounds."""
        if self._drawn_with is None:
            self._drawn_with = self._noise()
        return self._drawn_with

    def _draw(self, logits: Tensor, i: int) -> tuple[Tensor, None]:
        return argmax(self.logprobs(logits) + self.shared()[:, i]), None

    def verify(self, drafts: Drafts, logits: Tensor) -> Verdict:
        # Noise that is computed here is not kept: where this is captured, a call computes it again, to be compared.
        noise = self._noise() if self._drawn_with is None else self._drawn_with
        logprobs = self.logprobs(self._batch.processed(logits, drafts.tokens))
        return verify_coupled(drafts.tokens, logprobs, noise[:, : logits.shape[1]], drafts.lengths)


def resolve_mode(mode: str, params: Sequence[SamplingParams]) -> str:
    """Return the mode; `auto` is greedy if every request is, else rejection. Errors: ConfigError if the mode is unknown
    or cannot verify those requests."""
    where = f"verification ({flag('verification')})"
    if mode not in MODES:
        refuse(where, mode, ", ".join(MODES[:-1]) + f" or {MODES[-1]}", "unknown verification mode", "use auto")
    sampled = [row.temperature for row in params if not row.greedy]
    if mode == GREEDY and sampled:
        what, fix = "greedy verification cannot verify samples", "use temperature 0, or the rejection or coupled mode"
        where = f"{where} and temperature ({flag('temperature')})"
        refuse(where, f"greedy at temperature {sampled[0]}", "temperature 0", what, fix)
    return mode if mode != "auto" else "rejection" if sampled else GREEDY


def verification_in(mode: str, batch: Batch, gamma: int, model: Transformer) -> Verification:
    """Return the verification of at most `gamma` drafts after the batch's current tokens, by `model`'s logits."""
    if mode == GREEDY:
        return Greedy(batch)
    if mode == "rejection":
        return Rejection(batch)

    def noise() -> Tensor:
        keys, dtype = (batch.seeds[:, None], batch.requests[:, None]), torch.promote_types(model.dtype, torch.float32)
        return gumbel(*keys, batch.positions(gamma + 1) + 1, Stream.COUPLED, model.config.vocab_size, dtype)

    return Coupled(batch, noise)
