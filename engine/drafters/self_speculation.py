"""SelfSpeculation: the target drafts for itself over a second, budgeted cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from common.errors import ConfigError, flag
from engine.batch import Batch
from engine.drafters.base import ModelDrafter, Shown, check_target
from engine.drafters.config import ModelDrafterConfig, Parts
from kv_cache import KVCache, StreamingKVCache, VerifyTopKCache, WriteThroughKVCache
from kv_cache.verify_topk import copy_chosen
from models.names import parse_layers

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runner import ModelRunner
    from models import Transformer


ROTATED = "self-speculation copies the target's keys, which are rotated already"


class SelfSpeculation(ModelDrafter):
    """The target drafts for itself over a second, budgeted cache (MagicDec, arXiv 2408.11049).

    That cache is never prefilled: it is filled from the target's own KV when it first follows a row, and written
    through by every verification, so only tokens of the current round are ever approximate. `model` may be a cheaper
    rendering of the same weights (another dtype); with `layers` it has only those of the target's layers (see
    `select_layers`), and so has its cache.
    Errors: ConfigError if gamma is negative or a verification block does not fit the cache's window.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        gamma: int,
        model: Transformer | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(runner.over(cache, model), gamma)
        if isinstance(cache, StreamingKVCache) and cache.rotate_on_read:
            fix = "build the cache with rotate_on_read=False: the draft sees the target's own positions"
            raise ConfigError(ROTATED, "SelfSpeculation: cache.rotate_on_read", True, False, fix)
        self._target, self.cache, self._layers = runner, cache, layers
        self._n_rounds, self._observed = 0, None
        self.verification_cache = self._through = WriteThroughKVCache(runner.cache, cache, layers)
        if isinstance(cache, VerifyTopKCache):
            sizes = runner.model.config.n_head, runner.model.dtype, runner.cache.capacity
            self._observed = cache.observer(gamma + 1, *sizes)
            self._observe()

    def check(self, target: ModelRunner, length: int) -> None:
        check_target(self, self._target.cache, target.cache)
        super().check(target, length)

    def follow(self, rows: Sequence[Shown]) -> None:
        for row, _, text, *_ in rows:
            queries = None
            if self.cache.n_observed and len(text) > self.cache.capacity:
                queries = self._target.last_queries(row, text, self.cache.n_observed)
            self.cache.fill_row(row, self._target.cache, len(text), self._layers, queries)
            if self._observed is not None:
                self._observed.forget(row)

    def is_due(self) -> bool:
        if self._observed is None:
            return False
        self._n_rounds += 1
        self._observe()
        return self._n_rounds % self.cache.refresh == 0

    def _observe(self) -> None:
        """Observe the verification before entries are chosen anew, and no other."""
        is_last = (self._n_rounds + 1) % self.cache.refresh == 0
        self._through.observed = self._observed if is_last else None

    def refresh(self, batch: Batch, gamma: int) -> None:
        assert isinstance(self.cache, VerifyTopKCache) and self._observed is not None
        source, own = batch.of(self._target.cache, gamma), batch.of(self.cache)
        copy = getattr(self._target.model.backend, "copy_chosen", copy_chosen)
        own.choose(source, batch.lengths, self._observed, self._layers, copy)

    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        return self._runner.last_logits(tokens[:, None], batch.lengths[:, None] + i, cache)


@dataclass(frozen=True, kw_only=True)
class SelfConfig(ModelDrafterConfig):
    """The model over a small KV cache."""

    name: ClassVar[str] = "self"
    draft_layers: str | None = None
    """layers that self runs, such as 0-9,20-29: it skips the others (default: all)"""

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None if self.draft_layers is None else tuple(parse_layers(self.draft_layers, flag("draft_layers")))

    def check(self) -> None:
        super().check()
        _ = self.layers
        if self.policy.in_cache_positions:
            where = flag("draft_positions")
            raise ConfigError(ROTATED, where, "cache", "absolute", f"leave out {where}")

    def build(self, parts: Parts) -> SelfSpeculation:
        model = parts.model or parts.runner.model
        return SelfSpeculation(parts.runner, parts.new_cache(model.config), parts.gamma, model, self.layers)
