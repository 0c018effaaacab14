"""SavedText: an oracle that proposes a known text; drafting costs nothing, so it shows the highest speedup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.drafters.base import RowUpdate
from engine.drafters.config import DrafterConfig, Parts
from engine.drafters.text_drafter import Guess, HostDrafter
from engine.runner import ModelRunner


class SavedText(HostDrafter):
    """Proposes the next tokens of `texts[request id]`, the tokens expected after that request's prompt.

    It goes by position alone, even where the target has left the text. Behind the end of a text, and for a request
    without a text, it proposes nothing. In rejection mode a text must be independent of the run's random numbers: not
    an output of that mode for the same seed and request.
    """

    def __init__(self, runner: ModelRunner, texts: Mapping[int, Sequence[int]], gamma: int) -> None:
        super().__init__(runner, gamma)
        self._texts, self._begun = texts, dict[int, int]()

    def continued(self, update: RowUpdate) -> Guess:
        if update.n_seen == 0:
            self._begun[update.row] = len(update.tokens)
        n_emitted = len(update.tokens) - self._begun[update.row]
        return Guess(self._texts.get(update.request_id, ())[n_emitted : n_emitted + self.gamma])


@dataclass(frozen=True, kw_only=True)
class OracleConfig(DrafterConfig):
    """The baseline's output, which costs nothing to draft and shows the highest speedup."""

    name: ClassVar[str] = "oracle"
    needs_baseline: ClassVar[bool] = True

    def build(self, parts: Parts) -> SavedText:
        assert parts.texts is not None, "the plan admits an oracle only beside a baseline"
        return SavedText(parts.runner, dict(enumerate(parts.texts)), parts.gamma)
