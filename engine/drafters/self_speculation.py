"""SelfSpeculation: the target drafts for itself over a second, budgeted cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from torch import Tensor

from common.errors import ConfigError, flag, require_at_least
from common.launch import triton_reads
from engine.batch import Batch
from engine.drafters.base import Drafter, ModelDrafter, Shown, check_gamma
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, Parts
from engine.drafters.ngram import NGramConfig
from engine.drafters.standalone import StandaloneConfig
from engine.runner import ModelRunner
from kv_cache import KVCache, Streaming, StreamingKVCache, VerifyTopKCache, WriteThroughKVCache
from kv_cache.verify_topk import Choosing
from models import Transformer
from models.checkpoints.model_source import ModelSource, find_model
from models.names import parse_layers

ROTATED = "self-speculation copies the target's keys, which are rotated already"


class SelfSpeculation(ModelDrafter):
    """The target drafts for itself over a second, budgeted cache (MagicDec, arXiv 2408.11049).

    That cache is never prefilled: it is filled from the target's own KV when it first follows a row, and written
    through by every verification, so only tokens of the current round are ever approximate. `model` may be a cheaper
    rendering of the same weights (another dtype); with `layers` it has only those of the target's layers (see
    `select_layers`), and so has its cache. Errors: ConfigError if a block of gamma + 1 does not fit the cache's window.
    """

    verification_cache: WriteThroughKVCache
    runs_missed = False

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        gamma: int,
        model: Transformer | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.own = runner.over(cache, model)
        super().__init__(self.own, gamma, runner.cache)
        if isinstance(cache, StreamingKVCache) and cache.rotate_on_read:
            fix = "build the cache with rotate_on_read=False: the draft sees the target's own positions"
            raise ConfigError(ROTATED, "SelfSpeculation: cache.rotate_on_read", True, False, fix)
        self._target, self.cache, self.layers, self.ranks = runner, cache, layers, runner.ranks
        self._n_rounds, self._observed, self.refresh_every = 0, None, cache.refresh_every
        self._choosing = Choosing()
        self.verification_cache = WriteThroughKVCache(runner.cache, cache, layers)
        if isinstance(cache, VerifyTopKCache):
            sizes = runner.model.config.n_head, runner.model.dtype, runner.cache.capacity
            self._observed = cache.observer(gamma + 1, *sizes)
            if triton_reads(cache.entries):
                from kv_cache.choosing import TritonChoosing

                self._choosing = TritonChoosing()
            self._observe()

    def follow(self, rows: Sequence[Shown]) -> None:
        for row, _, text, known, _ in rows:
            queries = None
            if self.cache.selects and known <= self.cache.capacity:  # nothing was selected yet
                known = 0
            if self.cache.n_queries and len(text) > self.cache.capacity and not known:
                queries = self._target.last_queries(row, text, self.cache.n_queries)
            self.cache.fill_row(row, self._target.cache, len(text), self.layers, queries, known=known)
            if self._observed is not None:
                self._observed.forget(row)

    def is_due(self) -> bool:
        if self._observed is None:
            return False
        self._n_rounds += 1
        self._observe()
        return self._is_due_in(self._n_rounds)

    def _is_due_in(self, n: int) -> bool:
        """The second round, the first behind a verification, and every so many from there."""
        return (n - 2) % self.refresh_every == 0

    def _observe(self) -> None:
        """Observe the verification before entries are chosen anew, and no other."""
        self.verification_cache.observed = self._observed if self._is_due_in(self._n_rounds + 1) else None

    def refresh(self, batch: Batch, gamma: int) -> None:
        assert isinstance(self.cache, VerifyTopKCache) and self._observed is not None
        source, own = batch.of(self._target.cache, gamma), batch.of(self.cache)
        backend = self._target.model.backend
        how = backend if isinstance(backend, Choosing) else self._choosing
        own.choose(source, batch.lengths, self._observed, self.layers or range(len(own.entries)), how)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        return self._runner.last_logits(tokens[:, None], batch.lengths[:, None] + i, cache)


@dataclass(frozen=True, kw_only=True)
class SelfConfig(ModelDrafterConfig):
    """The model over a small KV cache."""

    name: ClassVar[str] = "self"
    draft_layers: str | None = None
    """layers that self runs, such as 0-9,20-29: it skips the others (default: all)"""
    draft_of_draft: Literal["ngram", "streaming"] | str | None = None
    """what drafts for the draft: copies from the row's own text (ngram), or, over sinks and --inner_budget entries in
    all, the draft itself (streaming) or a smaller model, whose converted checkpoint is named (default: nothing)"""
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
        own = replace(self, gamma=self.inner_gamma, gamma_schedule=None, policy=policy, policies=())
        if self.draft_of_draft == "streaming":
            return replace(own, draft_of_draft=None)
        shared = {one.name: getattr(own, one.name) for one in fields(ModelDrafterConfig)}
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
        """Raise ConfigError for what is drawn token by token, which an inner round does not, or an inner budget."""
        where, seen = flag("draft_of_draft"), self.draft_of_draft
        for other, is_given in (("text_drafts", self.texts), ("gamma_schedule", self.gamma_schedule == "confidence")):
            if is_given:
                what, fix = "a draft that is speculated for does not draw token by token", f"leave out {flag(other)}"
                raise ConfigError(what, f"{where} and {flag(other)}", seen, f"no {flag(other)} of tokens", fix)
        if seen != "ngram":
            gammas = {"gamma": 0 if self.gamma == "auto" else self.gamma, "inner_gamma": self.inner_gamma}
            longest, inner = max(gammas, key=gammas.__getitem__), Streaming(self.inner_budget)
            least = inner.n_sink + gammas[longest] + 1
            check_gamma(gammas[longest], inner.room, {"inner_budget": least}, longest)
        if seen == "streaming" and not self.auto_budget and self.inner_budget >= self.policy.entries(sys.maxsize):
            what, where = "a draft of the draft that reads as much saves nothing", flag("inner_budget")
            required = f"less than the draft's own budget, {self.policy.entries(sys.maxsize)}"
            fix = f"lower {where}, or raise {flag('draft_budget')}"
            raise ConfigError(what, where, self.inner_budget, required, fix)

    def find_source(self, target: ModelSource, load_format: str, verify: bool) -> ModelSource | None:
        path, where = self.draft_of_draft, flag("draft_of_draft")
        if path is None or not isinstance(self.inner, StandaloneConfig):
            return None
        if load_format != "dummy" and not os.path.exists(path):
            required, fix = "ngram, streaming or a converted checkpoint", "check the spelling and the folder"
            raise ConfigError("there is no such draft of a draft", where, path[:80], required, fix)
        return find_model(path, load_format, None, where, verify)

    def build(self, parts: Parts) -> Drafter:
        model = parts.model or parts.runner.model
        return SelfSpeculation(parts.runner, parts.new_cache(model.config), parts.gamma, model, self.layers)
