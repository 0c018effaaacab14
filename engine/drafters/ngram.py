"""NGram: drafts copied from the row's text (prompt lookup decoding); it has no probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import require_at_least
from engine.batch import Batch
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs
from engine.drafters.text_drafter import TextConfig, TextDrafter
from engine.runner import ModelRunner


class NGram(TextDrafter):
    """Proposes the tokens that followed the last tokens where these occurred before (Saxena, Prompt Lookup Decoding,
    2023).

    The longest match of at most `max_ngram` tokens wins; among equals that with the most tokens after it, up to gamma,
    then the latest. Without a match a row gets no draft. max_ngram: 1 or more.
    """

    def __init__(self, runner: ModelRunner, gamma: int, max_ngram: int = 3) -> None:
        super().__init__(runner, gamma)
        self.max_ngram = max_ngram
        self._text = torch.zeros_like(runner.cache.positions)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for row, _, text, known, *_ in rows:
            self._text[row, known : len(text)] = torch.tensor(text[known:], device=self._text.device)

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        rows, lengths = batch.rows[:, None], batch.lengths
        self._text[rows, (lengths[:, None] - 1).clamp(min=0)] = batch.previous[:, None]
        self._text[rows, lengths[:, None]] = batch.current[:, None]
        text = self._text[batch.rows, : batch.extent(gamma)]
        match, n_tokens = find_ngram(text, lengths, gamma, self.max_ngram)
        ahead = torch.arange(1, gamma + 1, device=text.device)
        tokens = text.gather(1, (match[:, None] + ahead).clamp(max=text.shape[1] - 1))
        # The next round may match them; rejected tokens are overwritten, or lie after the row's end.
        self._text[rows, (lengths[:, None] + ahead).clamp(max=self._text.shape[1] - 1)] = tokens
        return tokens, n_tokens


def find_ngram(text: Tensor, lengths: Tensor, gamma: int, max_ngram: int) -> tuple[Tensor, Tensor]:
    """Find where each row's last tokens occurred before, and how many tokens to copy from after it.

    text: `[B, C]` int64; row b is known up to and including position `lengths[b]`. Returns the position `[B]` of the
    last token of the best match (see `NGram`), and `n_tokens [B]`, 0 .. gamma; 0 without a match. Both int64.
    """
    position = torch.arange(text.shape[1], device=text.device)
    last = lengths[:, None]
    matches = position < last
    matched = torch.zeros_like(text)
    for back in range(min(max_ngram, text.shape[1])):
        last_tokens = text.gather(1, (last - back).clamp(min=0))
        same = torch.zeros_like(matches)
        same[:, back:] = text[:, : text.shape[1] - back] == last_tokens
        matches = matches & same & (last >= back)
        matched += matches
    available = (last - position).clamp(min=0, max=gamma)
    size = text.shape[1]
    rank = (matched * (gamma + 1) + available) * size + position
    best = rank.masked_fill(matched == 0, -1).argmax(dim=1, keepdim=True)
    found = matched.gather(1, best) > 0
    return best.squeeze(1), (available.gather(1, best) * found).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class NGramConfig(TextConfig):
    """Copies from the row's text."""

    name: ClassVar[str] = "ngram"
    max_ngram: int = 3

    def check(self) -> None:
        super().check()
        require_at_least("max_ngram", self.max_ngram, 1)

    def build(self, inputs: BuildInputs, gamma: int) -> NGram:
        return NGram(inputs.runner, gamma, self.max_ngram)
