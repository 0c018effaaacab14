"""Drafters for tests: an oracle that errs in a controlled way, row by row."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.drafters import RowUpdate
from engine.drafters.saved_text import SavedText
from engine.noise import Stream, uniform

KINDS = ("oracle", "reject", "upto", "ragged", "random")


class Guesses(SavedText):
    """Knows each request's future, and proposes of it, by `kind`: all of it ("oracle"), nothing but errors
    ("reject"), a right beginning of random length and errors behind it ("upto"; "ragged" also drops a
    random number of the last drafts, all included), or noise ("random"). What it guesses for a request
    at a position does not depend on the batch.
    """

    def __init__(
        self, runner, texts: Mapping[int, Sequence[int]], gamma: int, kind: str, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(runner, texts, gamma)
        self.kind, self.vocab_size = kind, vocab_size
        self.seed = torch.tensor(seed)
        self.requests = torch.zeros(runner.cache.max_batch, dtype=torch.int64)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        super().follow(rows)
        for row, request, *_ in rows:
            self.requests[row] = request

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        (tokens, n_tokens), of = super().guess(batch, gamma), (self.requests[batch.rows], batch.lengths)
        if self.kind == "random":
            return self._below(self.vocab_size, *of, gamma), n_tokens
        n_right = {"oracle": gamma, "reject": 0}.get(self.kind)
        right = self._below(gamma + 1, *of, 1) if n_right is None else n_right
        wrong = (tokens + 1) % self.vocab_size
        tokens = torch.where(torch.arange(gamma) < right, tokens, wrong)
        if self.kind == "ragged":
            n_tokens = torch.minimum(n_tokens, self._below(gamma + 1, of[0], of[1] + 1000, 1)[:, 0])
        return tokens, n_tokens

    def _below(self, bound: int, requests: Tensor, lengths: Tensor, n: int) -> Tensor:
        numbers = uniform(self.seed, requests, lengths, Stream.DRAFT, max(n, 1))[:, :n]
        return (numbers * bound).long()
