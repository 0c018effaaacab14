"""Whether a run fits: the memory plan of the rank with the largest shard, against what is free."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from common.errors import ConfigError, flag
from common.process import local_world_size
from engine.bench.memory import Footprint, MemoryPlan, available_bytes, plan_memory, require_memory
from engine.bench.plan import Plan
from engine.runner import captured_sizes, prefill_chunk_of
from kv_cache.entries import largest
from models import ModelConfig
from models.tensor_parallel import Shard, shard_config

# They are lists of Python's numbers, some 40 bytes each.
MOST_PROMPT_TOKENS = 2**31


def require_room(plan: Plan) -> None:
    """Raise OutOfMemoryError if the largest shard, on each rank of this machine, does not fit, or ConfigError for the
    prompts."""
    require_memory(memory_plan(plan), plan.n_rows, room(plan), plan.device)
    if plan.n_prompts * plan.prefix_len > MOST_PROMPT_TOKENS:
        where = f"{flag('num_prompts')} ({flag('B')}, if not given) and {flag('prefix_len')}"
        seen, required = f"{plan.n_prompts} x {plan.prefix_len}", f"<= {MOST_PROMPT_TOKENS} tokens"
        raise ConfigError("there are too many prompt tokens to hold", where, seen, required, "ask for fewer prompts")


def room(plan: Plan) -> int:
    """Bytes that each rank of this machine may take."""
    return available_bytes(plan.device) // (local_world_size() if plan.device == "cpu" else 1)


def memory_plan(plan: Plan) -> MemoryPlan:
    """What the rank with the largest shard needs."""
    draft, quantize, drafting = plan.draft, plan.config.target.quantize, None
    n_communicator = len({group for group in (plan.group, plan.draft_group) if len(group) > 1})
    config = _largest_shard(plan.target.config, plan.group)
    dequantizes = _dequantizes(plan, config, plan.dtype, plan.kv_dtype)
    target = Footprint(config, plan.dtype, (plan.capacity,), quantize, plan.kv_dtype, dequantizes)
    if draft and draft.policy and draft.dtype is not None:
        if draft.source:
            config = _largest_shard(draft.source.config, plan.draft_group)
        if draft.layers is not None:
            config = replace(config, n_layer=len(draft.layers))
        dequantizes = _dequantizes(plan, config, draft.dtype, draft.kv_dtype, draft.policy.in_cache_positions)
        prefills, observed = draft.source is not None, draft.policy.n_observed
        capacities = draft.capacities * (2 if prefills and plan.chooses else 1)  # what a prompt left is kept
        stored = (config, draft.dtype, capacities, draft.quantize, draft.kv_dtype, dequantizes)
        drafting = Footprint(*stored, shares_weights=plan.shares_weights, prefills=prefills, observed=observed)
    return plan_memory(
        target,
        drafting,
        device=plan.device,
        block=plan.gamma + 1,
        prefill_chunk=min(prefill_chunk_of(torch.device(plan.device)), plan.capacity),
        sampling=plan.sampling.params,
        vocab_size=plan.target.config.vocab_size,
        captured_rows=captured_rows(plan),
        n_communicator=n_communicator + (plan.config.n_replicas > 1),
    )


def captured_rows(plan: Plan) -> int:
    """How many `[V]` of logits, and of distributions to reject by, CUDA graphs keep for a row while the longest round
    runs over all rows: those of all other rounds that may be chosen, and of the baseline's, for every number of rows.
    """
    draft = plan.draft
    if plan.device == "cpu" or plan.config.target.no_cuda_graphs:
        return 0
    gammas = [0]
    if draft:
        gammas += [*([0] if draft.automatic else []), *(gamma for _ in draft.capacities for gamma in draft.gammas)]
    twice = 2 if plan.sampling.mode == "rejection" else 1
    longest, *each = (1 + twice * gamma for gamma in (max(gammas), *gammas))
    return math.ceil(sum(each) * sum(captured_sizes(plan.n_rows)) / plan.n_rows) - longest


def _dequantizes(
    plan: Plan, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None, rotates_keys: bool = False
) -> Callable[[int], bool] | None:
    """Of the attention that a model of that shape gets over such entries; None unless they are 8-bit.

    rotates_keys: keys are rotated to their positions as they are read, dequantised for whatever attention.
    """
    if entries not in largest():
        return None
    if rotates_keys:
        return lambda n_token: True
    return plan.attention(config, dtype, entries).backend.dequantizes


def _largest_shard(config: ModelConfig, group: Sequence[int]) -> ModelConfig:
    return shard_config(config, Shard(len(group) - 1, len(group)))
