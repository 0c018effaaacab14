"""SelfSpeculation: the target drafts for itself over a second, budgeted cache."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from torch import Tensor

from common.errors import ConfigError, flag, require_at_least
from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate, check_gamma
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, Parts
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.ngram import NGramConfig
from engine.drafters.standalone import StandaloneConfig
from engine.runner import ModelRunner
from kv_cache import KVCache, StreamingKVCache, WriteThroughKVCache
from kv_cache.refreshed import ObservingKVCache, RefreshedKVCache
from kv_cache.streaming import Streaming
from models import Transformer
from models.attention.selection import selection_ops
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.model_source import ModelSource, find_model
from models.names import parse_layers

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
    """layers that self runs, such as 0-9,20-29: it skips the others (default: all)"""
    draft_of_draft: Literal["ngram", "streaming"] | str | None = None
    """the draft of the draft: copies from the row's text (ngram); the same model (streaming) or a smaller model, given
    by its converted checkpoint, over --inner_budget entries (default: none)"""
    inner_gamma: int = 2
    """--draft_of_draft: tokens that are drafted for each forward of the draft"""
    inner_budget: int = 64
    """--draft_of_draft streaming or a model: KV entries per row, sinks and recent ones together"""

    @property
    def inner(self) -> DrafterConfig | None:
        if self.draft_of_draft is None:
            return None
        if self.draft_of_draft == "ngram":
            return NGramConfig(gamma=self.inner_gamma)
        policy = Streaming(self.inner_budget)
        inner = replace(self, gamma=self.inner_gamma, gamma_schedule=None, policy=policy, policies=(), alternatives=())
        if self.draft_of_draft == "streaming":
            return replace(inner, draft_of_draft=None)
        shared = {field.name: getattr(inner, field.name) for field in fields(ModelDrafterConfig)}
        return StandaloneConfig(**shared, draft_model=self.draft_of_draft)

    @property
    def unused(self) -> tuple[str, ...]:
        by_kind = {None: ("inner_gamma", "inner_budget"), "ngram": ("inner_budget",)}
        return *super().unused, *by_kind.get(self.draft_of_draft, ())

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None if self.draft_layers is None else tuple(parse_layers(self.draft_layers, flag("draft_layers")))

    def check(self) -> None:
        super().check()
        _ = self.layers
        if self.policy.in_cache_positions:
            where = flag("draft_positions")
            raise ConfigError(ROTATED, where, "cache", "absolute", f"leave out {where}")
        if self.draft_of_draft is not None:
            require_at_least("inner_gamma", self.inner_gamma, 1)
            self._check_inner()

    def _check_inner(self) -> None:
        """Raise ConfigError for options that need token-by-token drafts, and for an inner budget that does not fit."""
        where, seen = flag("draft_of_draft"), self.draft_of_draft
        for other, is_given in (("text_drafts", self.texts), ("gamma_schedule", self.gamma_schedule == "confidence")):
            if is_given:
                what, fix = "a draft with a draft does not draw token by token", f"leave out {flag(other)}"
                raise ConfigError(what, f"{where} and {flag(other)}", seen, f"no {flag(other)} of tokens", fix)
        if seen != "ngram":
            gammas = {"gamma": 0 if self.gamma == "auto" else self.gamma, "inner_gamma": self.inner_gamma}
            longest = max(gammas, key=gammas.__getitem__)
            check_gamma(gammas[longest], Streaming(self.inner_budget).room, longest, "inner_budget")
        if seen == "streaming" and not self.auto_budget:  # the same model saves nothing if it reads as much
            require_at_least("draft_budget", self.policy.entries(sys.maxsize), self.inner_budget + 1)

    def find_source(
        self, target: ModelSource, load_format: str, verify: bool, changes: ConfigChanges = NO_CHANGES
    ) -> ModelSource | None:
        path, where = self.draft_of_draft, flag("draft_of_draft")
        if path is None or not isinstance(self.inner, StandaloneConfig):
            return None
        if load_format != "dummy" and not os.path.exists(path):
            required, fix = "ngram, streaming or a converted checkpoint", "check the spelling and the folder"
            raise ConfigError("there is no such draft of a draft", where, path[:80], required, fix)
        return find_model(path, load_format, None, where, verify, changes)

    def build(self, parts: Parts) -> Drafter:
        model = parts.model or parts.runner.model
        return SelfSpeculation(parts.runner, parts.new_cache(model.config), parts.gamma, model, self.layers)
