"""Plans of memory for tiny models, without a run."""

from types import SimpleNamespace
from typing import Any

import torch

from bench.config import RunConfig
from bench.memory import Footprint, MemoryPlan, plan_memory
from bench.resolved import ResolvedSampling
from engine.sampling import SamplingParams
from kv_cache import FullKVCache, StreamingKVCache
from models import ModelConfig

CAPACITY, BUDGET, BLOCK = 96, 20, 4
GREEDY = ResolvedSampling(SamplingParams(), "greedy")


def never(n_token: int, group: int | None) -> bool:
    return False


def self_draft(config: ModelConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> Footprint:
    """A draft that is the target over a small cache."""
    cache = StreamingKVCache(config, 1, BUDGET, device="meta", dtype=changes.pop("kv_dtype", None) or dtype)
    usual = {"caches": (cache,), "dequantizes": never, "shares_weights": True, "prefills": False}
    return Footprint(config, dtype, **usual | changes)


def plan_of(config: ModelConfig, dtype: torch.dtype = torch.float32, /, **changes: Any) -> MemoryPlan:
    """Of that target, and of a self-draft unless another is given; changes: of its footprint, or of the run."""
    stored = {"quantize": changes.pop("quantize", None), "dequantizes": changes.pop("dequantizes", never)}
    cache = FullKVCache(config, 1, CAPACITY, "meta", changes.pop("kv_dtype", None) or dtype)
    draft = changes.pop("footprint", self_draft(config, dtype))
    drafts = [draft] if draft else []
    return plan_memory(run_of(config, **changes), Footprint(config, dtype, (cache,), **stored), *drafts)


def run_of(config: ModelConfig, /, **changes: Any) -> Any:
    """What of a run its memory depends on, beside its models."""
    run = {"target": SimpleNamespace(config=config), "draft": None, "gamma": BLOCK - 1, "sampling": GREEDY}
    run |= {"config": RunConfig(), "device": "cpu", "n_rows": 1, "capacity": CAPACITY, "group": (0,), "draft_group": ()}
    return SimpleNamespace(**run | changes)
