"""The KV policies that shared tests run over, a row each, and a `generate` that requires selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import Mock

import torch

from engine import ModelRunner, generate
from engine.drafters import Drafter
from engine.generation import GenerateOutput
from kv_cache import FullKVCache, KVCache, StreamingKVCache
from kv_cache.base import KVShape, PromptEntries
from kv_cache.quantized import QuantizedKVCache
from kv_cache.retrieval import Retrieval
from kv_cache.scored import ScoredPolicy
from kv_cache.snapkv import SnapKV
from kv_cache.verify_topk import VerifyTopK
from tests.support.tiny import TINY


@dataclass(frozen=True)
class Size:
    """Size of a draft's cache: rows, longest text, dtype, and a budget of `n_kept` entries next to a window.

    window: at least gamma + 1 tokens.
    """

    n_rows: int
    longest: int
    n_kept: int
    window: int
    dtype: torch.dtype

    @property
    def budget(self) -> int:
        return self.n_kept + self.window


@dataclass(frozen=True)
class Policy:
    """make: returns an empty cache of a size. is_exact: whether it stores entries unchanged."""

    make: Callable[[KVShape, Size], KVCache]
    is_exact: bool = True

    @property
    def sample(self) -> KVCache:
        """A small cache, which says whether the policy selects, and by how many queries."""
        return self.make(TINY, Size(n_rows=1, longest=9, n_kept=1, window=2, dtype=torch.float64))


@dataclass(frozen=True)
class SmallestKeys(ScoredPolicy):
    """Select the entries with the keys of smallest norm (arXiv 2406.11430); no queries are needed."""

    def score(self, prompt: PromptEntries) -> torch.Tensor:
        return -prompt.keys.norm(dim=-1)


def streaming(shape: KVShape, size: Size, rotate_on_read: bool = False) -> KVCache:
    how = {"dtype": size.dtype, "rotate_on_read": rotate_on_read}
    return StreamingKVCache(shape, size.n_rows, size.budget, size.n_kept, **how)


def quantized(shape: KVShape, size: Size) -> KVCache:
    how = {"group": size.window, "window": size.window, "dtype": size.dtype}
    return QuantizedKVCache(shape, size.n_rows, size.longest, **how)


def by(new_policy: Callable[[Size], ScoredPolicy]) -> Policy:
    """Return a policy that selects `n_kept + 1` entries."""
    return Policy(lambda shape, size: new_cache(new_policy(size), shape, size))


def new_cache(policy: ScoredPolicy, shape: KVShape, size: Size) -> KVCache:
    return policy.new_cache(shape, size.n_rows, size.longest, "cpu", size.dtype)


POLICIES = {
    "streaming": Policy(streaming),
    "full": Policy(lambda shape, size: FullKVCache(shape, size.n_rows, size.longest, dtype=size.dtype)),
    "streaming, positions in the cache": Policy(partial(streaming, rotate_on_read=True)),
    "snapkv": by(lambda size: SnapKV(size.budget + 1, size.window)),
    "smallest keys": by(lambda size: SmallestKeys(size.budget + 1, size.window)),
    "verify_topk": by(lambda size: VerifyTopK(size.budget + 1, size.window, n_sink=0)),
    "retrieval": by(
        lambda size: Retrieval(size.budget + 1, size.window, n_sink=0, refresh=2, chunk=min(3, size.window))
    ),
    "quantized": Policy(quantized, is_exact=False),
}
# A self-draft copies the target's keys, which are rotated already.
SELF_DRAFT_POLICIES = tuple(name for name in POLICIES if "positions" not in name)
BY_POSITION = tuple(
    name for name in SELF_DRAFT_POLICIES if POLICIES[name].is_exact and not POLICIES[name].sample.selects
)
# Policies for a model without queries whose entries are whole numbers.
WITHOUT_QUERIES = tuple(n for n in SELF_DRAFT_POLICIES if POLICIES[n].is_exact and not POLICIES[n].sample.n_queries)


def generate_selecting(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], drafter: Drafter | None, **settings: Any
) -> GenerateOutput:
    """Run `generate`; require that a draft's cache that selects did so for every prompt that outgrew it."""
    cache = getattr(getattr(drafter, "_runner", None), "cache", None)
    if cache is None or not cache.selects:
        return generate(runner, prompts, drafter=drafter, **settings)
    cache.selected = Mock(side_effect=type(cache).selected.__get__(cache))
    out = generate(runner, prompts, drafter=drafter, **settings)
    selected = {call.args[1].length for call in cache.selected.call_args_list}
    for prompt, row in zip(prompts, out.stats.rows, strict=True):
        assert not row.drafted or len(prompt) <= cache.capacity or len(prompt) in selected, "nothing was selected"
    return out
