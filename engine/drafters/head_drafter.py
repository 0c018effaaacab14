"""HeadDrafter: drafts with the layers of a trained head, over a KV cache that is made of the target's hidden states."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.errors import flag, refuse
from common.say import say
from engine.batch import Batch
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs, DrafterConfig, DraftPlan, Trait
from engine.drafters.hidden_states import HiddenStateBuffer, n_slots
from engine.drafters.model_drafter import CachedPlan, ModelDrafter, ModelDrafterConfig
from engine.drafters.stored import Models, PlannedTarget, Weights
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from kv_cache import KVCache, Policy
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.heads.base import TransformerHead
from models.heads.loading import HeadSource, find_head


class HeadDrafter(ModelDrafter):
    """Base of drafters whose head has layers: its cache has at position p the entry of the target's state at p.

    A round first writes the entries of all tokens of the last verification again, accepted or not, so that shapes never
    change: the target's states replace the head's approximations, and entries after the row's end are overwritten
    before a query sees them. Tokens of other drafters' rounds get their entries from `hidden_buffer`. A prompt's states
    are not in there, so its tokens whose entries the cache keeps run through the target again. Errors: ConfigError if a
    round does not fit the cache's window.
    """

    hidden_buffer: HiddenStateBuffer
    _head: TransformerHead
    _states: Tensor
    _known: Tensor

    def __init__(self, runner: ModelRunner, head: TransformerHead, cache: KVCache, gamma: int) -> None:
        require_by_position(cache, type(cache).__name__)
        super().__init__(runner.over(cache, head.body), gamma, runner.cache)
        head.borrow(runner.model)
        self._target, self._head, self.cache = runner, head, cache
        # A cache that keeps only the end of a prompt needs the whole prompt to choose it.
        self.follows_parts = cache.max_block == cache.max_length
        self.hidden_buffer = HiddenStateBuffer(runner, gamma, head.shape.state_dim, head.shape.inputs_of)

    @abstractmethod
    def write(self, states: Tensor, following: Tensor, positions: Tensor, view: KVCache) -> Tensor | None:
        """Write entries of the text by the target's `states [B, T, state_dim]` at `positions [B, T]`, and the tokens
        `following [B, T]` them; return the head's next states, if it has any."""

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for update in rows:
            if update.n_seen == 0:
                self.cache.reset_row(update.row)
            self._fill(update)
            if update.is_whole_prompt:
                self.hidden_buffer.begin(update.row, update.tokens)

    def _fill(self, update: RowUpdate) -> None:
        """Write the entries of tokens that were missed, where the cache keeps them, but not the last token's."""
        row, text, n_seen, kept = update.row, update.tokens, update.n_seen, self.hidden_buffer.kept(update.verified)
        # From the last round before n_seen on, which may have left the head's approximations.
        n_prompt, first = update.verified.start, max(0, n_seen - self.gamma - 1)
        if n_seen >= n_prompt:  # there are none in the prompt; the first round writes the entry of its last token
            first = max(first, n_prompt - (n_seen == n_prompt))
        retained = self.cache.retained_positions(len(text) - 1)
        missed = retained[retained >= first].tolist()
        most = min(self._target.prefill_chunk, self.cache.prefill_block)
        while missed:
            begin, is_kept = missed[0], missed[0] in kept
            n = sum(p == begin + i and (p in kept) == is_kept for i, p in enumerate(missed[:most]))
            at, missed = range(begin, begin + n), missed[n:]
            if is_kept:
                states = self.hidden_buffer.of_row(row, at)
            else:
                states, _ = self._target.recompute(row, text, at, self.hidden_buffer.layers)
            following, positions = torch.tensor([[text[p + 1] for p in at], [*at]], device=self.cache.device)[:, None]
            self.write(states, following, positions, self.cache.view(slice(row, row + 1), at.stop, block_at_end=True))

    def fused(self, states: Tensor) -> Tensor:
        """Combine the target's states, `[..., state_dim]`, to the head's, `[..., dim]`."""
        return self._head.fused(states.to(self._head.body.dtype))

    def draw_all(self, states: Tensor, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        """Draw each draft from the logits of its state, all computed at once. states: `[B, gamma or more, dim]`."""
        self._states, self._known = states, self._head.draft_logits(states)
        drafts = super().propose(batch, verification, gamma)
        del self._states, self._known
        return drafts

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        return self._head.of_target(self._known[:, i])


def require_by_position(cache: KVCache | Policy, name: str) -> None:
    """Raise ConfigError if a head's cache would select entries by content rather than by position."""
    if cache.selects:
        what, where = "a head's cache cannot select entries by their content", "draft_policy"
        refuse(where, name, "a policy that goes by position", what, f"use {flag(where)} streaming or full")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """Options of a head that was trained for the target."""

    TRAITS: ClassVar[Trait] = Trait.SECOND_MODEL

    draft_model: str

    def find(self, target: PlannedTarget, changes: ConfigChanges = NO_CHANGES) -> HeadSource:
        """Find the head without loading it. changes: of its layers' config. Errors: UserError."""
        return find_head(self.draft_model, self.name, target.source.config, changes)


@dataclass(frozen=True, kw_only=True)
class HeadPlan(DraftPlan):
    """A head, whole on every rank of the target, and the target's states that it drafts from."""

    source: HeadSource
    weights: Weights

    def weights_read(self, target: PlannedTarget) -> int:
        source, config, dtype = self.source, target.source.config, target.weights.dtype
        n_output = config.vocab_size * config.dim if "output layer" in source.borrowed else 0
        output_bytes = n_output * (1 if target.weights.quantize else dtype.itemsize)
        return source.n_bytes(self.weights.dtype, self.weights.quantize, of_step=True) + output_bytes

    def n_bytes(self, target: PlannedTarget, profiles: bool) -> tuple[dict[Weights, int], int]:
        states = n_slots(self.gamma) * self.source.shape.state_dim * target.weights.dtype.itemsize
        return {self.weights: self.source.n_bytes(self.weights.dtype, self.weights.quantize)}, states

    def load(self, models: Models) -> None:
        if self.weights in models.loaded:
            return
        if borrowed := self.source.borrowed:
            say(f"{self.source.name} uses the target's {' and '.join(borrowed)}")
        form: dict[str, Any] = {"dtype": self.weights.dtype, "quantize": self.weights.quantize}
        models.loaded[self.weights] = self.source.load(device=models.planned.device, **form)


@dataclass(frozen=True, kw_only=True)
class HeadDrafterConfig(HeadConfig, ModelDrafterConfig):
    """Options of a head whose layers have a KV cache."""

    DRAFTER: ClassVar[type[HeadDrafter]]

    def check(self) -> None:
        super().check()
        require_by_position(self.policy, self.policy.name)
        self.require_fixed()

    def plan(self, target: PlannedTarget) -> DraftPlan:
        facts = self.facts(target, partial(self.find, target))
        weights = Weights(facts["source"], self.dtype(target), self.scheme(target))
        return HeadDrafterPlan(group=target.group, weights=weights, **facts)


@dataclass(frozen=True, kw_only=True)
class HeadDrafterPlan(HeadPlan, CachedPlan):
    config: HeadDrafterConfig
    source: HeadSource

    def n_bytes(self, target: PlannedTarget, profiles: bool) -> tuple[dict[Weights, int], int]:
        weights, states = super().n_bytes(target, profiles)
        return weights, states + self.new_cache(self.source.config, 1, target.capacity, "meta").n_bytes

    def load(self, models: Models) -> None:
        is_loaded = self.weights in models.loaded
        super().load(models)
        if not is_loaded:
            self.say_weights()
            models.planned.prepare(models.loaded[self.weights].body, self.kv_dtype, "the draft's attention")

    def make(self, inputs: BuildInputs) -> HeadDrafter:
        runner, head = inputs.runner, inputs.models.loaded[self.weights]
        cache = self.new_cache(head.body.config, runner.max_batch, inputs.length, runner.device)
        return self.config.DRAFTER(runner, head, cache, self.gamma)
