"""SelfSpeculation: the target drafts for itself over a second, budgeted cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from common.errors import ConfigError, flag, refuse
from engine.batch import Batch
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs
from engine.drafters.model_drafter import CachedPlan, ModelDrafter, ModelDrafterConfig, check_policy
from engine.drafters.stored import Models, PlannedTarget, Weights, largest_shard, weights_bytes
from engine.runner import ModelRunner
from kv_cache import KVCache, StreamingKVCache, WriteThroughKVCache
from kv_cache.refreshed import ObservingKVCache, RefreshedKVCache
from models import Transformer
from models.attention.selection import selection_ops
from models.llama import select_layers
from models.names import parse_layers
from models.storage import KV_DTYPES

ROTATED = "self-speculation copies the target's keys, which are rotated already"


class SelfSpeculation(ModelDrafter):
    """Drafts with the target over a second, budgeted cache (MagicDec, arXiv 2408.11049).

    That cache is never prefilled: it is filled from the target's entries when it first follows a row, and written
    through by every verification, so only tokens of the current round are ever approximate. `model` may have the same
    weights in a cheaper dtype; with `layers` it has only these layers of the target (see `select_layers`), and so has
    its cache. Errors: ConfigError if a block of gamma + 1 does not fit the cache's window.
    """

    is_written_through = True

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        gamma: int,
        model: Transformer | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.runner = runner.over(cache, model)
        super().__init__(self.runner, gamma, runner.cache)
        if isinstance(cache, StreamingKVCache) and cache.rotate_on_read:
            fix = "build the cache with rotate_on_read=False: the draft sees the target's positions"
            raise ConfigError(ROTATED, "SelfSpeculation: cache.rotate_on_read", True, False, fix)
        self._target, self.cache, self.layers = runner, cache, layers
        self.write_through = WriteThroughKVCache(runner.cache, cache, layers)
        if isinstance(cache, RefreshedKVCache):
            sizes = runner.model.config.n_head, runner.model.dtype, runner.cache.capacity
            self.refresh_every, cache.scores = cache.refresh_every, cache.new_scores(gamma + 1, *sizes)
            self._ops = selection_ops(runner.model.backend, cache.entries)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for row, _, text, n_seen, *_ in rows:
            queries = None
            if self.cache.selects and n_seen <= self.cache.capacity:  # nothing was selected yet
                n_seen = 0
            if self.cache.n_queries and len(text) > self.cache.capacity and not n_seen:
                queries = self._target.last_queries(row, text, self.cache.n_queries)
            self.cache.fill_row(row, self._target.cache, len(text), self.layers, queries, n_known=n_seen)

    def verified_cache(self, observe: bool) -> WriteThroughKVCache:
        return ObservingKVCache(self.write_through) if observe else self.write_through

    def refresh(self, batch: Batch, gamma: int) -> None:
        source, view = batch.view_of(self._target.cache, gamma), batch.view_of(self.cache)
        assert isinstance(view, RefreshedKVCache)
        view.choose(source, batch.lengths, self.layers or range(len(view.entries)), self._ops)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        return self.runner.last_logits(tokens[:, None], batch.lengths[:, None] + i, cache)


@dataclass(frozen=True, kw_only=True)
class SelfConfig(ModelDrafterConfig):
    """The model over a small KV cache."""

    name: ClassVar[str] = "self"
    draft_layers: str | None = None

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None if self.draft_layers is None else tuple(parse_layers(self.draft_layers, flag("draft_layers")))

    def check(self) -> None:
        super().check()
        _ = self.layers
        if self.policy.in_cache_positions:
            refuse("draft_positions", "cache", "absolute", ROTATED, f"leave out {flag('draft_positions')}")

    def plan(self, target: PlannedTarget) -> SelfPlan:
        self.check()
        if self.layers and (most := max(self.layers)) > (last := target.source.config.n_layer - 1):
            what = "the draft's layers are not all layers of the model"
            refuse("draft_layers", f"layer {most}", f"0 to {last}", what, f"name layers up to {last}")
        check_policy(target.source, self.policy)
        gamma, dtype = self.fitting_gamma(sys.maxsize), self.dtype(target)
        scheme = self.scheme(target, target.source, len(target.group)) or target.weights.quantize
        # "same" means entries as the target's, where these are in 8 bits, or else the draft's dtype.
        is_like_target = self.draft_kv_dtype == "same" and target.kv_dtype != target.weights.dtype
        return SelfPlan(
            config=self,
            gamma=gamma,
            policy=self.policy,
            capacity=self.policy.entries(target.length(gamma)),
            weights=Weights(target.source, dtype, scheme, self.layers),
            kv_dtype=target.kv_dtype if is_like_target else KV_DTYPES.get(self.draft_kv_dtype, dtype),
        )


@dataclass(frozen=True, kw_only=True)
class SelfPlan(CachedPlan):
    """The target, or some of its layers; in the target's form its weights are shared."""

    config: SelfConfig

    def shares(self, target: PlannedTarget) -> bool:
        """Return whether it runs the target's weights as they are loaded."""
        return replace(self.weights, layers=None) == target.weights

    def n_bytes(self, target: PlannedTarget, profiles: bool) -> tuple[dict[Weights, int], int]:
        of_model = weights_bytes(self.weights, target.group, target.device)
        config = largest_shard(self.weights.config, target.group)
        cache = self.new_cache(config, 1, target.capacity, "meta")
        per_row = cache.n_bytes
        if isinstance(cache, RefreshedKVCache):
            per_row += cache.new_scores(self.gamma + 1, config.n_head, self.weights.dtype, target.capacity).n_bytes
        return {} if self.shares(target) else {self.weights: of_model}, per_row

    def load(self, models: Models) -> None:
        planned = models.planned
        if self.weights in models.loaded or self.weights == planned.weights:
            return
        if self.shares(planned):
            model = select_layers(models.target, self.weights.layers or ())
        else:
            model = planned.load(self.weights, models.target_ranks)
            self.say_weights()
        models.loaded[self.weights] = model
        planned.prepare(model, self.kv_dtype, "the draft's attention")

    def make(self, inputs: BuildInputs) -> SelfSpeculation:
        runner = inputs.runner
        model = inputs.models.loaded.get(self.weights, runner.model)
        cache = self.new_cache(model.config, runner.max_batch, inputs.length, runner.device)
        return SelfSpeculation(runner, cache, self.gamma, model, self.config.layers)
