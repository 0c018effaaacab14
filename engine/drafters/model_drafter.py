"""ModelDrafter: drafts token by token from a model's logits, over a KV cache that follows the target's rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from common.errors import ConfigError, flag, refuse, require_at_least
from common.say import dtype_name, say
from engine.batch import Batch
from engine.drafters.base import Drafter, check_gamma, require_same_cache
from engine.drafters.config import AUTO, DrafterConfig, DraftPlan
from engine.drafters.schedules import OF_CONFIDENCE, THRESHOLD, Confidence, Schedule
from engine.drafters.stored import PlannedTarget, Weights, step_bytes
from engine.modes import Drafts, Verification
from engine.remote_runner import RemoteRunner
from engine.runner import ModelRunner
from kv_cache import FullKVCache, KVCache, Policy
from kv_cache.full import Full
from kv_cache.streaming import Streaming
from kv_cache.trial import try_policy
from models import ModelConfig
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.loading import expected_shapes
from models.checkpoints.model_source import ModelSource, check_vocabulary
from models.kernels.packed_linear import can_pack
from models.kernels.quantize import check_scheme
from models.names import Dtype, KVDtype, Scheme
from models.storage import DTYPES, KV_DTYPES, auto_draft_weights
from models.tensor_parallel import Shard, shard_config


class ModelDrafter(Drafter):
    """Base of drafters that run a model; `runner` may stand for a model on other ranks.

    target_cache: the cache of the target, for a model that continues the target's entries or states.
    """

    def __init__(self, runner: ModelRunner | RemoteRunner, gamma: int, target_cache: KVCache | None = None) -> None:
        self.gamma, self._target_cache, self._runner = gamma, target_cache, runner
        self._cache = None if runner.cache is target_cache else runner.cache
        require_at_least("gamma", gamma, 0)
        if self._cache is not None:
            check_gamma(gamma, self._cache.max_block)

    @abstractmethod
    def logits(self, batch: Batch, i: int, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """Return the logits `[B, V]` of the i-th draft, which follows `tokens [B]`; of a sharded model on the rank that
        decides. cache: the part of the draft's cache that a round can touch."""

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        cache = None if self._cache is None else batch.view_of(self._cache, gamma)
        tokens, distributions, bounds = [batch.current], [], self.schedule.bounds(batch, gamma)
        for i in range(gamma):
            logits = self.logits(batch, i, tokens[-1], cache)

            def draw(logits: Tensor = logits, i: int = i, bounds: Tensor = bounds) -> Tensor:
                token, distribution = verification.draw(logits, i)
                if distribution is not None:
                    distributions.append(distribution)
                return torch.stack([token, self.schedule.shorten(bounds, i, logits, token, batch)])

            token, bounds = self._runner.ranks.broadcast(draw, 2, len(batch.current))
            tokens.append(token)
            if self.schedule.n_columns(bounds, batch, gamma) <= i + 1:
                break
        drafted, probs = torch.stack(tokens, dim=1)[:, 1:], torch.stack(distributions, dim=1) if distributions else None
        return self.schedule.cut(Drafts(drafted, probs, bounds if self.schedule.varies else None), batch)

    def check(self, target: ModelRunner, length: int) -> None:
        if self._target_cache is not None:
            require_same_cache(self, self._target_cache, target)
        name, room = type(self).__name__, None if self._cache is None else self._cache.max_length
        if self._runner.max_batch != target.max_batch:
            what = "the draft cache has another number of rows than the target's"
            seen, fix = self._runner.max_batch, "build both caches with the same max_batch"
            raise ConfigError(what, f"{name}: cache.max_batch", seen, target.max_batch, fix)
        if room is not None and length > room:
            what, fix = "prompt + new tokens + gamma + 1 exceeds the draft's KV cache", "give the draft a longer cache"
            raise ConfigError(what, f"{name}: cache", f"{length} tokens", f"<= {room}", f"{fix}, or a StreamingKVCache")

    def rollback(self, batch: Batch) -> None:
        if self._cache is not None:
            batch.view_of(self._cache).rollback(batch.lengths)
        super().rollback(batch)


@dataclass(frozen=True, kw_only=True)
class CachedPlan(DraftPlan):
    """A draft that runs a model over a KV cache. kv_dtype: of its entries."""

    config: ModelDrafterConfig
    policy: Policy
    weights: Weights
    kv_dtype: torch.dtype

    def new_cache(self, config: ModelConfig, n_rows: int, length: int, device: str | torch.device) -> KVCache:
        """Return an empty cache for a model, or its shard. A budget beyond the rows' `length` takes no memory: with
        twice as many entries, a ring runs prompts in the same chunks."""
        return self.policy.within(0, 2 * length).new_cache(config, n_rows, length, device, self.kv_dtype)

    def say_weights(self) -> None:
        if self.weights.quantize and self.config.draft_weights == AUTO:
            say(f"the draft's weights: {self.weights.quantize} (--draft_weights auto)")

    def record(self) -> dict[str, Any]:
        storage = {"draft_dtype": dtype_name(self.weights.dtype), "draft_weights": self.weights.quantize}
        return {**super().record(), **storage, "draft_kv_dtype": dtype_name(self.kv_dtype)}

    def weights_read(self, target: PlannedTarget) -> int:
        """Return the bytes of its weights that a draft step reads."""
        return step_bytes(self.weights, self.group or target.group, target.device)

    def reads(self, target: PlannedTarget) -> dict[str, float]:
        length, weights = target.prefix_len + target.gen_len, self.weights_read(target)
        kv = FullKVCache(target.source.config, 1, length, "meta", target.kv_dtype).n_bytes
        cache = self.new_cache(self.weights.config, 1, length, "meta")  # it may be larger than a row is at its end
        shares = {
            "draft_weights_share": weights / step_bytes(target.weights, target.group, target.device),
            "draft_entries_share": self.policy.entries(length) / length,
            "draft_kv_share": cache.n_bytes * min(1.0, length / cache.capacity) / kv,
        }
        return {name: min(1.0, share) for name, share in shares.items()}

    def remarks(self, target: PlannedTarget) -> list[str]:
        said, longest = list[str](), target.prefix_len + target.gen_len
        if self.gamma and self.budget_covers(target):
            said.append(f"a draft's budget of {self.capacity} entries drops none of a row's {longest} tokens")
        if (source := self.source) is None:
            return said
        if remark := check_vocabulary(target.source, source):
            said.append(remark)
        if source.is_changed:
            said.append(f"{source.name} has the target's changes of rotary settings, beyond its trained context")
        end = longest + self.gamma
        reach = min(self.capacity, end) if self.policy.in_cache_positions else end
        if reach > source.config.max_context:
            context = source.config.max_context
            said.append(f"{source.name} was trained on {context} positions, and is used up to {reach}")
        return said


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(DrafterConfig):
    """Options of a drafter that runs a model over a KV cache of its budget."""

    SCHEDULES: ClassVar[tuple[str | None, ...]] = (*DrafterConfig.SCHEDULES, "confidence")

    policy: Policy = field(default_factory=Streaming)
    draft_dtype: Literal["auto", "same"] | Dtype = "auto"
    draft_weights: Literal["auto", "same"] | Scheme = "auto"
    draft_kv_dtype: Literal["same"] | KVDtype = "same"
    confidence_threshold: float | Literal["auto"] = THRESHOLD
    p_min: float = 0.0

    @property
    def automatic(self) -> tuple[str, ...]:
        return (*super().automatic, *(["draft_budget"] if self.policy.automatic else []))

    def alternatives(self, prefix_len: int) -> Sequence[Self]:
        return [replace(self, policy=policy) for policy in self.policy.alternatives(prefix_len)]

    def within(self, n_entries: int, gamma: int) -> Self:
        return replace(self, policy=self.policy.within(n_entries, gamma + 1))

    def ablated(self, has_weights: bool, has_budget: bool) -> Self:
        weights: dict[str, Any] = {} if has_weights else {"draft_dtype": "same", "draft_weights": "same"}
        entries: dict[str, Any] = {} if has_budget else {"draft_kv_dtype": "same", "policy": Full()}
        return replace(self, **weights, **entries)

    def options(self) -> dict[str, Any]:
        options, policy = super().options(), self.policy
        del options["policy"]
        of_policy = {option.name: getattr(policy, option.name) for option in fields(policy)}
        return {**options, "draft_policy": policy.name, **of_policy}

    def schedule(self, gamma: int, runner: ModelRunner) -> Schedule:
        if self.gamma_schedule == "confidence":
            return Confidence(self.confidence_threshold, self.p_min, runner.max_batch, runner.device)
        return super().schedule(gamma, runner)

    def check(self) -> None:
        super().check()
        for name in OF_CONFIDENCE:
            if (share := getattr(self, name)) != AUTO and not 0 <= share <= 1:
                refuse(name, share, "0 to 1", f"{flag(name)} is no probability", "leave it out")
        if not self.policy.automatic:
            if self.gamma != AUTO:  # first, since a block needs more of the budget
                check_gamma(self.gamma, self.policy.room)
            self.policy.check()

    def fitting_gamma(self, most_drafts: int) -> int:
        """Return the most draft tokens of a round that the cache's window has room for, too."""
        return min(super().fitting_gamma(most_drafts), self.policy.room - 1)

    def facts(self, target: PlannedTarget, find: Callable[[ConfigChanges], ModelSource]) -> dict[str, Any]:
        """Return the fields of the plan of a draft with a second model. find: finds the model, with changes.

        Beyond its trained context the model has the target's changes of rotary settings, unless its cache counts
        positions."""
        self.check()
        source = find(NO_CHANGES)
        gamma, dtype = self.fitting_gamma(source.most_drafts), self.dtype(target)
        length, trained, changes = target.length(gamma), source.config.max_context, target.changes.rotary
        policy = self.policy.for_context(trained, length)
        if changes and trained < length and not policy.in_cache_positions:
            source = find(changes)
        check_policy(source, policy)
        entries = KV_DTYPES.get(self.draft_kv_dtype, dtype)
        cache = {"policy": policy, "capacity": policy.entries(length), "kv_dtype": entries}
        return {"config": self, "gamma": gamma, "source": source, **cache}

    def dtype(self, target: PlannedTarget) -> torch.dtype:
        """Return the dtype of the draft's weights."""
        of_target = target.weights.dtype
        if self.draft_dtype == AUTO and of_target == torch.float32 and can_pack(target.device, torch.bfloat16):
            return torch.bfloat16
        return DTYPES.get(self.draft_dtype, of_target)

    def scheme(self, target: PlannedTarget, source: ModelSource | None = None, n_ranks: int = 1) -> str | None:
        """Return the scheme of the draft's weights, None without any. source: the model that `auto` quantises, on so
        many ranks. Errors: ConfigError for a scheme that the device lacks."""
        scheme: str | None = None if self.draft_weights in (AUTO, "same") else self.draft_weights
        is_auto = self.draft_weights == self.draft_dtype == AUTO and target.weights.quantize is None
        if is_auto and source is not None and not source.config.n_expert:
            shapes = _linear_shapes(source.config, n_ranks)
            scheme = auto_draft_weights(target.device, self.dtype(target), shapes, source.published, target.n_rows)
        if scheme:
            check_scheme(scheme, target.device, source.config.n_expert if source else 0, flag("draft_weights"))
        return scheme

    def require_fixed(self) -> None:
        """Raise ConfigError if the budget would be chosen while decoding."""
        if self.policy.automatic:
            what = "a draft with a second model cannot change its cache, which would have to be prefilled again"
            refuse("draft_budget", AUTO, "a number of entries", what)


def check_policy(source: ModelSource, policy: Policy) -> None:
    """Raise ConfigError if a policy could select entries that a model's sliding window hides, or fails in a trial."""
    if source.config.sliding_window is not None and policy.selects:
        what, where = "a policy selects entries that a sliding window hides", f"{flag('draft_policy')} on {source.name}"
        required, fix = "a model that attends to the whole context", f"use {flag('draft_policy')} streaming"
        refuse(where, policy.name, required, what, fix)
    try_policy(policy, source.config)


def _linear_shapes(config: ModelConfig, n_ranks: int) -> list[tuple[int, ...]]:
    """Return shapes `(d_out, d_in)` of the linear layers of a block, on every rank."""
    each = [expected_shapes(shard_config(config, Shard(rank, n_ranks))) for rank in range(n_ranks)]
    return [shape for shapes in each for name, shape in shapes.items() if name[:9] == "layers.0." and len(shape) == 2]
