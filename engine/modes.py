"""The three verification modes: how a round's drafts are drawn, and how the target judges them.

A round object joins the pure functions of `verification` with the law of each row and with random
numbers keyed by what they are for. The first token after a prefill is a round without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.noise import Stream, gumbel, uniform
from engine.sampling import Law, SamplingParams, greedy
from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection
from kv_cache.errors import ConfigError
from models import Transformer

MODES = ("auto", "greedy", "rejection", "coupled")


class Drafts(NamedTuple):
    """A round's proposals.

    tokens: `[B, g]` int64. probs: `[B, g, V]`, the laws that they were drawn from, where rejection needs
    them; None from a drafter without probabilities. lengths: `[B]` int64, how many of each row's tokens
    are meant; None for all.
    """

    tokens: Tensor
    probs: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """What sampling depends on besides the logits: each row's law, and its `seed` and `request` id `[B]` int64."""

    law: Law
    seed: Tensor
    request: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], requests: Sequence[int], device: str | torch.device) -> Rows:
        return cls(
            law=Law.of(params, device),
            seed=torch.tensor([row.seed for row in params], device=device),
            request=torch.tensor(requests, device=device),
        )


class VerificationRound(Protocol):
    """One round in one mode, over rows whose last token sits at position `lengths [B]`."""

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """The i-th draft `[B]` by a draft model's `logits [B, V]`, and its law `[B, V]` if judging needs it."""
        ...

    def judge(self, drafts: Drafts, logits: Tensor) -> Verdict:
        """The verdict of the target's `logits [B, g + 1, V]`."""
        ...


class GreedyRound:
    """Every token is an argmax."""

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, None]:
        return greedy(logits), None

    def judge(self, drafts: Drafts, logits: Tensor) -> Verdict:
        return verify_greedy(drafts.tokens, logits, drafts.lengths)


@dataclass(frozen=True)
class RejectionRound:
    """Drafting, accepting and resampling each have a stream of their own.

    What a round drew behind its first rejection is drawn again by the next round from the same numbers,
    which is sound: nothing that was emitted depended on them.
    """

    rows: Rows
    lengths: Tensor

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor]:
        probs = self.rows.law.probs(logits)
        noise = self._gumbel(self.lengths + 1 + i, Stream.DRAFT, probs)
        return (probs.log() + noise).argmax(dim=-1), probs

    def judge(self, drafts: Drafts, logits: Tensor) -> Verdict:
        probs = self.rows.law.probs(logits)
        n_drafts = drafts.tokens.shape[1]
        positions = self.lengths[:, None] + 1 + torch.arange(n_drafts, device=self.lengths.device)
        seed, request = self.rows.seed[:, None], self.rows.request[:, None]
        accept = uniform(seed, request, positions, Stream.ACCEPT).squeeze(-1)
        # A row resamples once a round, at a place not known yet; its rounds start at different positions.
        resample = self._gumbel(self.lengths + 1, Stream.RESAMPLE, probs)
        return verify_rejection(drafts.tokens, drafts.probs, probs, accept, resample, drafts.lengths)

    def _gumbel(self, positions: Tensor, stream: Stream, like: Tensor) -> Tensor:
        return gumbel(self.rows.seed, self.rows.request, positions, stream, like.shape[-1], like.dtype)


class CoupledRound:
    """Draft and target share one Gumbel vector per position; it is computed once, for both."""

    def __init__(self, rows: Rows, lengths: Tensor, gamma: int, vocab_size: int, dtype: torch.dtype) -> None:
        self._law = rows.law
        self._rows, self._lengths, self._gamma, self._vocab_size, self._dtype = rows, lengths, gamma, vocab_size, dtype

    @cached_property
    def _noise(self) -> Tensor:
        """`[B, gamma + 1, V]`, made when it is first needed: a rank that does not decide never needs it."""
        rows, lengths = self._rows, self._lengths
        positions = lengths[:, None] + 1 + torch.arange(self._gamma + 1, device=lengths.device)
        return gumbel(
            rows.seed[:, None], rows.request[:, None], positions, Stream.COUPLED, self._vocab_size, self._dtype
        )

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, None]:
        return (self._law.logprobs(logits) + self._noise[:, i]).argmax(dim=-1), None

    def judge(self, drafts: Drafts, logits: Tensor) -> Verdict:
        return verify_coupled(drafts.tokens, self._law.logprobs(logits), self._noise, drafts.lengths)


def resolve_mode(mode: str, params: Sequence[SamplingParams]) -> str:
    """`auto` is greedy if every request is, else rejection. Errors: ConfigError if a mode cannot be had."""
    if mode not in MODES:
        raise ConfigError(
            "unknown verification mode",
            where="verification (--verification)",
            seen=mode,
            required=", ".join(MODES[:-1]) + f" or {MODES[-1]}",
            fix="use auto",
        )
    sampled = [row.temperature for row in params if not row.greedy]
    if mode == "greedy" and sampled:
        raise ConfigError(
            "greedy verification cannot verify samples",
            where="verification (--verification) and temperature (--temperature)",
            seen=f"greedy at temperature {sampled[0]}",
            required="temperature 0",
            fix="use temperature 0, or the rejection or coupled mode",
        )
    return mode if mode != "auto" else "rejection" if sampled else "greedy"


def start_round(mode: str, rows: Rows, lengths: Tensor, gamma: int, model: Transformer) -> VerificationRound:
    """A round of at most `gamma` drafts behind position `lengths [B]`, judged by `model`'s logits."""
    if mode == "greedy":
        return GreedyRound()
    if mode == "rejection":
        return RejectionRound(rows, lengths)
    return CoupledRound(rows, lengths, gamma, model.config.vocab_size, torch.promote_types(model.dtype, torch.float32))
