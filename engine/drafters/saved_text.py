"""SavedText: an oracle that proposes a text known beforehand; drafting costs nothing, so it shows the ceiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from engine.batch import Batch
from engine.drafters.base import Shown, TextDrafter
from engine.drafters.config import DrafterConfig, Parts

if TYPE_CHECKING:
    from engine.runner import ModelRunner


class SavedText(TextDrafter):
    """Proposes the next tokens of `texts[request id]`, the tokens expected after that request's prompt.

    It goes by position alone: where the target has left the text, its drafts are verified as any. Behind the end of a
    text, and for a request without one, it proposes nothing. In rejection mode a text must be independent of the run's
    random numbers: not what that mode emitted for the same seed and request.
    """

    def __init__(self, runner: ModelRunner, texts: Mapping[int, Sequence[int]], gamma: int) -> None:
        super().__init__(runner, gamma)
        self._texts = texts
        n_rows, longest = runner.cache.max_batch, max(map(len, texts.values()), default=0)
        self._text = torch.zeros(n_rows, longest + gamma + 1, dtype=torch.int64, device=runner.device)
        self._start = torch.zeros(n_rows, dtype=torch.int64, device=runner.device)
        self._end = torch.zeros_like(self._start)

    def follow(self, rows: Sequence[Shown]) -> None:
        for row, request, text, known, *_ in rows:
            if known == 0:
                saved = self._texts.get(request, ())
                self._text[row, : len(saved)] = torch.tensor(saved, dtype=torch.int64, device=self._text.device)
                self._start[row], self._end[row] = len(text), len(saved)

    def guess(self, batch: Batch, gamma: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = batch.rows
        following = batch.lengths - self._start[rows] + 1
        ahead = torch.arange(gamma, device=following.device)
        index = (following[:, None] + ahead).clamp(min=0, max=self._text.shape[1] - 1)
        n_tokens = (self._end[rows] - following).clamp(min=0, max=gamma)
        return self._text[rows[:, None], index], n_tokens


@dataclass(frozen=True, kw_only=True)
class OracleConfig(DrafterConfig):
    """The baseline's own output, which costs nothing to draft and shows the machinery's ceiling."""

    name: ClassVar[str] = "oracle"
    needs_baseline: ClassVar[bool] = True

    def build(self, parts: Parts) -> SavedText:
        assert parts.texts is not None, "the plan admits an oracle only beside a baseline"
        return SavedText(parts.runner, dict(enumerate(parts.texts)), parts.gamma)
