"""Drafters without a model, which guess from text, on the device or on the host; they have no cache to roll back."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_integer
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import require_at_least
from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate, require_same_cache, wrong_drafts
from engine.drafters.config import BuildInputs, DrafterConfig, DraftPlan, drafters
from engine.drafters.stored import PlannedTarget
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner


class TextDrafter(Drafter):
    """Guesses on the device, in `guess`. State after a row's length is overwritten before it is read."""

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        require_at_least("gamma", gamma, 0)
        self.gamma, self._target_cache, self._ranks = gamma, runner.cache, runner.ranks
        self._n_ids = runner.vocab_size

    def check(self, target: ModelRunner, length: int) -> None:
        require_same_cache(self, self._target_cache, target)
        super().check(target, length)

    @abstractmethod
    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        """Return tokens `[B, gamma]` and how many of these each row uses `[B]`, both int64. Runs on the leader only."""

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        def decide() -> Tensor:
            tokens, n_tokens = self.guess(batch, gamma)
            return torch.cat([torch.minimum(n_tokens, self.schedule.bounds(batch, gamma))[:, None], tokens], dim=1)

        decided = self._ranks.broadcast(decide, len(batch.current), 1 + gamma)
        return self.schedule.cut(Drafts(decided[:, 1:], lengths=decided[:, 0]), batch)


class Guess(NamedTuple):
    """Tokens that may follow a text, and how many of its last tokens matched where they were found. is_predicted: True
    if that was in the request's prediction."""

    tokens: Sequence[int] = ()
    n_matched: int = 0
    is_predicted: bool = False


class HostDrafter(TextDrafter):
    """Looks tokens up on the leader's host. `follow` gets all rows every round, and `tokens` ends with the current
    token; it looks up there, since a captured `propose` may not read the host. n_guessed: on the leader, how many
    tokens were guessed for each row of the last `follow`, in its order."""

    reads_current = True

    def __init__(self, runner: ModelRunner, gamma: int) -> None:
        super().__init__(runner, gamma)
        self._guesses = torch.zeros(runner.max_batch, 1 + gamma, dtype=torch.int64, device=runner.device)
        self.n_guessed: list[int] = []

    @abstractmethod
    def continued(self, update: RowUpdate) -> Guess:
        """Learn a row's new tokens, and guess at most gamma tokens after them."""

    def guessed(self, update: RowUpdate) -> Guess:
        """Return `continued(update)`. Errors: ConfigError for more than gamma tokens, or ids outside the vocabulary."""
        guess = self.continued(update)
        try:
            is_right = len(guess.tokens) <= self.gamma and all(0 <= as_integer(x) < self._n_ids for x in guess.tokens)
        except (TypeError, AttributeError):
            is_right = False
        if not is_right:
            required = f"at most {self.gamma} ids, 0 <= id < {self._n_ids}"
            raise wrong_drafts(self, "continued", repr(guess)[:200], required)
        return guess

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        if rows and self._ranks.leads:
            found = {update.row: self.guessed(update) for update in rows}
            self.n_guessed = [len(guess.tokens) for guess in found.values()]
            self.n_predicted = {row: len(guess.tokens) for row, guess in found.items() if guess.is_predicted}
            packed = [[len(tokens), *tokens, *[0] * (self.gamma - len(tokens))] for tokens, *_ in found.values()]
            self._guesses[[update.row for update in rows]] = torch.tensor(packed, device=self._guesses.device)

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        guesses = self._guesses[batch.rows]
        return guesses[:, 1 : 1 + gamma], guesses[:, 0].clamp(max=gamma)


@dataclass(frozen=True, kw_only=True)
class TextConfig(DrafterConfig):
    """Options of a draft from text, which runs no model and has no cache."""

    @abstractmethod
    def build(self, inputs: BuildInputs, gamma: int) -> TextDrafter:
        """Make the drafter, without its schedule, for rounds of up to `gamma` tokens."""

    def plan(self, target: PlannedTarget) -> DraftPlan:
        self.check()
        return TextPlan(config=self, gamma=self.most_gamma)


@dataclass(frozen=True, kw_only=True)
class HostDrafterConfig(TextConfig):
    """Options of a draft that is looked up on the host, and can go in front of a model's drafts."""

    @abstractmethod
    def build(self, inputs: BuildInputs, gamma: int) -> HostDrafter: ...


def text_kinds() -> dict[str, type[HostDrafterConfig]]:
    """Return the options of drafts from text that can go in front of a model's, by name."""
    return {name: kind for name, kind in drafters().items() if issubclass(kind, HostDrafterConfig)}


@dataclass(frozen=True, kw_only=True)
class TextPlan(DraftPlan):
    """A draft from text: no memory, and nothing to load."""

    config: TextConfig

    def make(self, inputs: BuildInputs) -> Drafter:
        return self.config.build(inputs, self.gamma)
