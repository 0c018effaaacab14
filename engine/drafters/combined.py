"""Combined: text drafters next to a model; confident guesses go in front of the model's drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar

from common.errors import flag, refuse
from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate
from engine.drafters.config import BuildInputs, DrafterConfig, Maker, Trait, Wrapper
from engine.drafters.model_drafter import ModelDrafterConfig
from engine.drafters.text_drafter import Guess, HostDrafter, HostDrafterConfig, text_kinds
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner


class Combined(HostDrafter):
    """Takes each row's longest guess, and among equals the best matched, of those that matched `least_match` tokens.

    The model runs over a row's guess and drafts the rest of gamma. If every row has a guess, it does not run, unless
    rounds are captured; it catches up before it drafts again. A guess counts as a point mass, as with all text
    drafters.
    """

    def __init__(self, runner: ModelRunner, model: Drafter, texts: Sequence[HostDrafter], least_match: int) -> None:
        super().__init__(runner, model.gamma)
        self.model, self.parts, self.schedule, self.refresh_every = model, (model,), model.schedule, model.refresh_every
        self.hidden_buffer = model.hidden_buffer
        self.is_written_through = model.is_written_through
        self._texts, self._least_match, self._is_captured = texts, least_match, runner.graphs is not None
        # By row, how many tokens the model had seen before it was left out.
        self._behind = dict[int, int]()
        self.skips_model, self._has_guesses = False, True  # captured rounds cannot branch, and keep these

    def continued(self, update: RowUpdate) -> Guess:
        guesses = [text.guessed(update) for text in self._texts]
        sure = [guess for guess in guesses if guess.tokens and guess.n_matched >= self._least_match]
        return max(sure, key=lambda guess: (len(guess.tokens), guess.n_matched), default=Guess())

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        super().follow(rows)
        prompts = [update for update in rows if update.n_seen == 0]
        for update in prompts:
            self._behind.pop(update.row, None)
        self.model.follow(prompts)
        if len(rows) == len(prompts):
            return
        if not self._is_captured:
            n_guessed = self._ranks.broadcast_object(lambda: self.n_guessed)
            self.skips_model, self._has_guesses = all(n_guessed), any(n_guessed)
        seen = [(update, self._behind.pop(update.row, update.n_seen)) for update in rows]
        missed = [(update, n_seen) for update, n_seen in seen if n_seen < len(update.tokens) - 1]
        if self.skips_model:  # a draft that is written through gets the verified tokens' entries
            self._behind |= {update.row: n_seen for update, n_seen in (missed if self.is_written_through else seen)}
        else:
            self.model.follow([update._replace(tokens=update.tokens[:-1], n_seen=n_seen) for update, n_seen in missed])

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        if self.skips_model:
            return super().propose(batch, verification, gamma)
        if self._has_guesses:  # without any, this spares the small operations of every draft
            verification.guesses = self.guess(batch, gamma)
        return self.model.propose(batch, verification, gamma)

    def rollback(self, batch: Batch) -> None:
        self.model.rollback(batch)  # its schedule is this drafter's


@dataclass(frozen=True, kw_only=True)
class Hybrid(Wrapper):
    """Drafts from text in front of a draft of a model, which has the schedule and gamma given here."""

    ASKED_BY: ClassVar[str] = "text_drafts"

    texts: tuple[HostDrafterConfig, ...]
    text_match: int = 8

    @classmethod
    def around(cls, draft: DrafterConfig, given: Mapping[str, Any], made: Maker) -> DrafterConfig:
        if isinstance(draft, Wrapper):
            refuse(f"{flag('text_drafts')} and {draft.ASKED_BY}", "both", "one of them", "the draft is wrapped already")
        if not isinstance(draft, ModelDrafterConfig):
            return draft
        kinds = text_kinds()
        if unknown := [name for name in given["text_drafts"] if name not in kinds]:
            refuse("text_drafts", unknown[0], ", ".join(kinds), "there is no such draft from text", "use one of these")
        texts = tuple(made(kinds[name], gamma_schedule=None) for name in given["text_drafts"])
        return made(cls, draft=draft, texts=texts)

    @property
    def traits(self) -> Trait:
        return reduce(or_, (text.traits for text in self.texts), self.draft.traits)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for text in self.texts:
            options |= text.options()
        names = [text.kind for text in self.texts]
        return {**options, **self.wrapped.options(), "text_drafts": names, "text_match": self.text_match}

    def check(self) -> None:
        super().check()
        for text in self.texts:
            text.check()

    def wrap(self, inputs: BuildInputs, *drafters: Drafter) -> Combined:
        [model] = drafters
        texts = [text.build(inputs, model.gamma) for text in self.texts]
        return Combined(inputs.runner, model, texts, self.text_match)
