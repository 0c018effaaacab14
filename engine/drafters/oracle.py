"""Oracle: proposes a known text; drafting costs nothing, so it shows the highest speedup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from common.errors import flag, refuse
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs, DraftPlan, Trait
from engine.drafters.stored import PlannedTarget
from engine.drafters.text_drafter import Guess, HostDrafter, TextConfig
from engine.runner import ModelRunner


class Oracle(HostDrafter):
    """Proposes the next tokens of `texts[request id]`, the tokens expected after that request's prompt.

    It goes by position alone, even where the target has left the text. After the end of a text, and for a request
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
class OracleConfig(TextConfig):
    """The baseline's output, which costs nothing to draft and shows the highest speedup."""

    name: ClassVar[str] = "oracle"
    TRAITS: ClassVar[Trait] = Trait.NEEDS_BASELINE

    def plan(self, target: PlannedTarget) -> DraftPlan:
        if not target.repeats_plain:
            what = "an oracle drafts the tokens of plain decoding"
            seen = f"rejection verification, or {flag('no_baseline')}"
            required = "greedy or coupled verification, which repeats plain decoding, and plain decoding"
            fix = f"use {flag('verification')} coupled, and both passes"
            refuse(f"{flag('draft')} {self.name}", seen, required, what, fix)
        return super().plan(target)

    def build(self, inputs: BuildInputs, gamma: int) -> Oracle:
        if inputs.texts is None:
            required, fix = "the texts of plain decoding", "decode plainly first, and give its tokens"
            refuse("Session.drafter: texts", None, required, "an oracle drafts known texts", fix)
        return Oracle(inputs.runner, dict(enumerate(inputs.texts)), gamma)
