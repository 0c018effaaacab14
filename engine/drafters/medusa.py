"""Medusa: drafts with heads on the target's last hidden state, a head for each draft position (arXiv 2401.10774)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.batch import Batch
from engine.drafters.base import RowUpdate, check_most_drafts
from engine.drafters.config import BuildInputs, DraftPlan
from engine.drafters.head_drafter import HeadConfig, HeadPlan
from engine.drafters.hidden_states import HiddenStateBuffer
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.stored import PlannedTarget, Weights
from engine.runner import ModelRunner
from kv_cache import KVCache
from models.heads.medusa import MedusaHeads


class Medusa(ModelDrafter):
    """Drafts every token of a round from the state before the row's current token: no draft sees another, and nothing
    is cached. Errors: ConfigError if there are fewer heads than gamma."""

    hidden_buffer: HiddenStateBuffer

    def __init__(self, runner: ModelRunner, heads: MedusaHeads, gamma: int) -> None:
        super().__init__(runner, gamma, runner.cache)
        check_most_drafts(gamma, len(heads))
        self._target, self._heads = runner, heads
        self.hidden_buffer = HiddenStateBuffer(runner, gamma, heads.shape.state_dim)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for update in rows:
            if update.is_whole_prompt:
                self.hidden_buffer.begin(update.row, update.tokens)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        states, _, _, last = self.hidden_buffer.of_rows(batch)
        out = self._heads[i](states.take_along_dim(last[..., None], dim=1)[:, 0])
        return out if self._heads.shape.has_output else self._target.model.logits(out)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa heads on the target's hidden state."""

    name: ClassVar[str] = "medusa"

    def plan(self, target: PlannedTarget) -> DraftPlan:
        self.check()
        source = self.find(target)
        gamma, weights = self.fitting_gamma(source.most_drafts), Weights(source, target.weights.dtype)
        return MedusaPlan(config=self, gamma=gamma, source=source, group=target.group, weights=weights)


@dataclass(frozen=True, kw_only=True)
class MedusaPlan(HeadPlan):
    def make(self, inputs: BuildInputs) -> Medusa:
        return Medusa(inputs.runner, inputs.models.loaded[self.weights], self.gamma)
