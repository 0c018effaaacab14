"""Drafters for tests: an oracle that errs in a controlled way, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.drafters import SavedText
from engine.modes import Drafts

KINDS = ("oracle", "reject", "upto", "ragged", "random")


class Guesses(SavedText):
    """Knows each request's future, and proposes of it, by `kind`: all of it ("oracle"), nothing but errors
    ("reject"), a right beginning of random length and errors behind it ("upto"; "ragged" also drops a
    random number of the last drafts, all included), or noise ("random").
    """

    def __init__(
        self, runner, texts: Mapping[int, Sequence[int]], gamma: int, kind: str, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(runner, texts, gamma)
        self.kind, self.vocab_size = kind, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, current: Tensor, lengths: Tensor, extent: int, verification) -> Drafts:
        tokens, _, n_tokens = super().propose(current, lengths, extent, verification)
        if self.kind == "random":
            return Drafts(self._below(self.vocab_size, tokens.shape), lengths=n_tokens)
        n_right = {"oracle": self.gamma, "reject": 0}.get(self.kind)
        right = self._below(self.gamma + 1, (len(tokens), 1)) if n_right is None else n_right
        wrong = (tokens + 1) % self.vocab_size
        tokens = torch.where(torch.arange(self.gamma) < right, tokens, wrong)
        if self.kind == "ragged":
            n_tokens = torch.minimum(n_tokens, self._below(self.gamma + 1, n_tokens.shape))
        return Drafts(tokens, lengths=n_tokens)

    def _below(self, bound: int, shape) -> Tensor:
        return torch.randint(bound, tuple(shape), generator=self.generator)
