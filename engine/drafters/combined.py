"""Combined: text drafters beside a model: what they guess with confidence goes in front of what the model drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from engine.batch import Batch
from engine.drafters.base import Drafter, Guess, HostDrafter, RowUpdate
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, Parts
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner


class Combined(HostDrafter):
    """Of each row's guesses found by `least_match` tokens or more, the longest, then the one found by most. The model
    runs over a row's guess and drafts what is left of gamma. Where every row has one, it does not run, but where rounds
    are captured; it catches up before it drafts again. Guesses are certain of their tokens, as all text drafts are."""

    def __init__(self, runner: ModelRunner, model: Drafter, texts: Sequence[HostDrafter], least_match: int) -> None:
        super().__init__(runner, model.gamma)
        self.model, self.parts, self.verification_cache = model, (model,), model.verification_cache
        self.observer, self.schedule = model.observer, model.schedule
        self.refresh_every, self.runs_missed = model.refresh_every, model.runs_missed
        self._texts, self._least_match, self._is_captured = texts, least_match, runner.graphs is not None
        self._skips, self._behind = False, dict[int, int]()

    def continued(self, update: RowUpdate) -> Guess:
        guesses = [text.continued(update) for text in self._texts]
        sure = [guess for guess in guesses if guess.tokens and guess.n_matched >= self._least_match]
        return max(sure, key=lambda guess: (len(guess.tokens), guess.n_matched), default=Guess())

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        super().follow(rows)
        prompts = [one for one in rows if one.n_seen == 0]
        for one in prompts:
            self._behind.pop(one.row, None)
        self.model.follow(prompts)
        if len(rows) == len(prompts):
            return
        each = [one.row for one in rows]
        self._skips = not self._is_captured and self._ranks.shared(lambda: bool(self._guesses[each, 0].all()))
        held = [(one, self._behind.pop(one.row, one.n_seen)) for one in rows]
        missed = [(one, known) for one, known in held if known < len(one.tokens) - 1]
        if self._skips:  # a draft that is written through has what is verified
            writes = self.verification_cache is not None
            self._behind |= {one.row: known for one, known in (missed if writes else held)}
        else:
            self.model.follow([one._replace(tokens=one.tokens[:-1], n_seen=known) for one, known in missed])

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        if self._skips:
            return super().propose(batch, verification, gamma)
        led = GuessThenDraft(verification, *self.guess(batch, gamma))
        return self.model.propose(batch, cast(Verification, led), gamma)

    def rollback(self, batch: Batch) -> None:
        self.model.rollback(batch)


class GuessThenDraft:
    """Draws a row's guess where there is one, certain of it; else as `verification` does."""

    def __init__(self, verification: Verification, tokens: torch.Tensor, n_tokens: torch.Tensor) -> None:
        self._verification, self._tokens, self._n_tokens = verification, tokens, n_tokens

    def draw(self, logits: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        token, probs = self._verification.draw(logits, i)
        guessed = i < self._n_tokens
        token = torch.where(guessed, self._tokens[:, i], token)
        if probs is not None:
            certain = torch.zeros_like(probs).scatter_(1, token[:, None], 1)
            probs = torch.where(guessed[:, None], certain, probs)
        return token, probs


def beside_texts(model: Drafter, config: DrafterConfig, parts: Parts) -> Drafter:
    """A drafter with the text drafters of its options beside it, if it has any."""
    if not isinstance(config, ModelDrafterConfig) or not config.texts:
        return model
    return Combined(parts.runner, model, [text.build(parts) for text in config.texts], config.text_match)
