"""The trial of a policy on a row of made-up entries, in a model's sizes, before anything is loaded."""

import torch
from torch import Tensor

from common.errors import refuse
from common.plug_ins import errors_refused, name_of
from kv_cache.base import KVShape, PromptEntries, TrialShape
from kv_cache.full import FullKVCache
from kv_cache.policy import Policy, described
from kv_cache.scored import ScoredKVCache, ScoredPolicy
from kv_cache.snapkv import SnapKV

LARGEST_BUDGET, BEYOND = 1024, 64  # of a trial, and the tokens of its text beyond the budget


def try_policy(policy: Policy, model: KVShape) -> None:
    """Fill a row of a policy's cache in the first and last layer of a model, and score every layer, unless by SnapKV's
    `score`. Errors: ConfigError if code of the policy raises an error, or returns slots or scores that cannot be used.
    Not for `auto` entries."""
    with errors_refused(type(policy)):
        tried, layers = policy.within(LARGEST_BUDGET, 1), sorted({0, model.n_layer - 1})
        length, sizes = tried.entries(LARGEST_BUDGET) + BEYOND, (model.n_kv_head, model.n_head, model.head_dim)
        cache = tried.new_cache(TrialShape(len(layers), *sizes), 1, length, "cpu", torch.float32)
        positions = torch.arange(length).expand(2, -1)
        seen = described(slots := cache.slots(positions))
        if isinstance(slots, Tensor) and slots.shape == positions.shape and slots.dtype == torch.int64:
            is_bad = (slots < 0) | (slots > positions) | (slots >= cache.capacity)
            seen = f"slot {int(slots[is_bad][0])} for position {int(positions[is_bad][0])}" if is_bad.any() else ""
        if seen:
            required = f"torch.int64 {[*positions.shape]}, 0 <= slot <= position, slot < {cache.capacity} entries"
            what, fix = "a policy puts tokens where rounds do not read them", "return a slot for each position"
            refuse(name_of(cache.slots), seen, required, what, fix)
        source = FullKVCache(TrialShape(1, *sizes), 1, length)
        numbers = torch.arange(source.entries.numel()).sin().view_as(source.entries)
        source.entries = numbers.expand(model.n_layer, *numbers.shape[1:])
        queries = torch.ones(model.n_head, cache.n_queries, model.head_dim) if cache.n_queries else None
        cache.fill_row(0, source, length, layers, None if queries is None else [queries] * model.n_layer)
        if not isinstance(tried, ScoredPolicy) or type(cache).selected is not ScoredKVCache.selected:
            return
        for layer in range(model.n_layer) if type(tried).score is not SnapKV.score else ():
            tried.older_scores(PromptEntries(source, 0, layer, length, queries), allows_nan=False)
