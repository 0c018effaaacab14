"""Combined: text drafters beside a model; confident guesses go in front of the model's drafts."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, Parts
from engine.drafters.text_drafter import Guess, HostDrafter
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import WriteThroughKVCache


class Combined(HostDrafter):
    """Takes each row's longest guess, and among equals the best matched, of those that matched `least_match` tokens.

    The model runs over a row's guess and drafts the rest of gamma. If every row has a guess, it does not run, unless
    rounds are captured; it catches up before it drafts again. A guess counts as a point mass, as with all text
    drafters.
    """

    def __init__(self, runner: ModelRunner, model: Drafter, texts: Sequence[HostDrafter], least_match: int) -> None:
        super().__init__(runner, model.gamma)
        self.model, self.parts, self.schedule, self.refresh_every = model, (model,), model.schedule, model.refresh_every
        self.observed = model.observed
        self.is_written_through = model.is_written_through
        self._texts, self._least_match, self._is_captured = texts, least_match, runner.graphs is not None
        # By row, how many tokens the model had seen before it was left out.
        self._behind = dict[int, int]()
        self.skips_model, self._has_guesses = False, True  # captured rounds cannot branch, and keep these

    def check(self, target: ModelRunner, length: int) -> None:
        super().check(target, length)
        self.model.check(target, length)

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
            n_guessed = self._ranks.shared(lambda: self.n_guessed)
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
        if not self._has_guesses:  # spares the small operations of every draft
            return self.model.propose(batch, verification, gamma)
        guessing = GuessThenDraft(verification, *self.guess(batch, gamma))
        return self.model.propose(batch, cast(Verification, guessing), gamma)

    def verified_cache(self, observe: bool) -> WriteThroughKVCache | None:
        return self.model.verified_cache(observe)

    def refresh(self, batch: Batch, gamma: int) -> None:
        self.model.refresh(batch, gamma)

    def rollback(self, batch: Batch) -> None:
        self.model.rollback(batch)


class GuessThenDraft:
    """Draws a row's guess with certainty; without a guess, draws as `verification` does."""

    def __init__(self, verification: Verification, tokens: Tensor, n_tokens: Tensor) -> None:
        self._verification, self._tokens, self._n_tokens = verification, tokens, n_tokens

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        token, probs = self._verification.draw(logits, i)
        guessed = i < self._n_tokens
        token = torch.where(guessed, self._tokens[:, i], token)
        if probs is not None:
            certain = torch.zeros_like(probs).scatter_(1, token[:, None], 1)
            probs = torch.where(guessed[:, None], certain, probs)
        return token, probs


def beside_texts(model: Drafter, config: DrafterConfig, parts: Parts) -> Drafter:
    """Return a drafter with the text drafters of its options beside it, if it has any."""
    if not isinstance(config, ModelDrafterConfig) or not config.texts:
        return model
    return Combined(parts.runner, model, [text.build(parts) for text in config.texts], config.text_match)
