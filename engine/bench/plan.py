"""What a run's flags mean, checked before anything is loaded: models, sizes, ranks, memory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import ConfigError
from common.jsonl import require_appendable
from common.process import LEADER, local_world_size, world_size
from engine.bench.data import BUILT_IN, PG19
from engine.bench.memory import DraftFootprint, MemoryPlan, available_bytes, plan_memory, require_memory
from engine.bench.model_source import ModelSource, check_vocabulary, find_model
from engine.bench.settings import (
    AUTO,
    DraftSettings,
    Sampling,
    require_at_least,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from engine.parallel.ranks import check_draft_ranks, check_rank_group, require_single_process
from engine.runner import prefill_chunk_of
from kv_cache.entries import largest
from models import ModelConfig
from models.attention import select_backend
from models.llama import attention_spec
from models.pointwise import check_compiler
from models.quantize import check_scheme
from models.tensor_parallel import Shard, check_count, shard_config

# Seconds: ranks start further apart than the least, and the most is what their libraries can count to.
RANK_TIMEOUTS = (1, 1_000_000)
# They are lists of Python's numbers, some 40 bytes each.
MOST_PROMPT_TOKENS = 2**31


@dataclass(frozen=True)
class Plan:
    """What a run's flags mean once they are checked, before anything is loaded. Ranks are in shard order.

    dataset: None where nothing is read.
    """

    args: argparse.Namespace
    sampling: Sampling
    draft: DraftSettings | None
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    draft_source: ModelSource | None
    dataset: str | None
    n_prompts: int
    capacity: int
    group: tuple[int, ...]
    draft_group: tuple[int, ...]


def resolve(args: argparse.Namespace, sampling: Sampling, draft: DraftSettings | None) -> Plan:
    """Check flags, files, contexts and ranks. Errors: UserError, the same on every rank."""
    gamma = draft.gamma if draft else 0
    for flag, minimum in (("B", 1), ("gen_len", 1), ("prefix_len", 1)):
        require_at_least(flag, getattr(args, flag), minimum)
    if draft and draft.kind == "oracle" and not sampling.reproducible:
        raise ConfigError(
            "an oracle drafts what the same random numbers emitted, which rejection must not be told",
            where="--draft oracle",
            seen=f"--verification {sampling.mode} at temperature {sampling.params.temperature}",
            required="greedy or coupled verification",
            fix="use --verification coupled",
        )
    n_prompts = args.B if args.num_prompts is None else args.num_prompts
    require_at_least("num_prompts", n_prompts, args.B)
    for flag in ("output", "save_rows"):
        require_appendable(getattr(args, flag), flag)
    if args.save_rows and args.output and os.path.realpath(args.save_rows) == os.path.realpath(args.output):
        raise ConfigError(
            "rows and records would be mixed",
            where="--save_rows and --output",
            seen=args.output,
            required="two files",
            fix="name another file for the rows",
        )
    shortest, longest = RANK_TIMEOUTS
    if not shortest <= getattr(args, "rank_timeout", shortest) <= longest:
        raise ConfigError(
            "no rank can be waited for that long",
            where="--rank_timeout",
            seen=args.rank_timeout,
            required=f"{shortest} to {longest} seconds",
            fix="leave it out",
        )
    device = resolve_device(args.device)
    target_flag = "--target" if draft and draft.kind == "standalone" else "--model"
    target = find_model(args.model, args.load_format, args.model_name, target_flag, args.verify)
    capacity = args.prefix_len + args.gen_len + gamma + 1
    context = target.config.max_context
    room = context - gamma - 1
    if capacity > context:
        raise ConfigError(
            "prompt + new tokens + gamma + 1 exceeds the model's context",
            where=f"--prefix_len, --gen_len and --gamma on {target.name}",
            seen=f"{args.prefix_len} + {args.gen_len} + {gamma} + 1 = {capacity} tokens",
            required=f"<= {context}",
            fix=f"use --prefix_len {room - args.gen_len} or less"
            if room > args.gen_len
            else f"use a shorter --gen_len: there is room for {room} prompt and new tokens together",
        )
    draft_source = None
    if draft and draft.model is not None:
        draft_source = find_model(draft.model, args.load_format, None, "--model", args.verify)
        draft = resolve_positions(draft, draft_source.config.max_context, capacity)
    elif draft and draft.layers is not None:
        _check_layers(draft.layers, target.config.n_layer)
    if draft and draft.policy == "snapkv":
        _check_no_sliding_window(draft_source or target)
    for scheme in {args.quantize, draft.quantize if draft else None} - {None}:
        check_scheme(scheme, device)
    if args.compile:
        check_compiler(device)
    group, draft_group = _rank_groups(args, target, draft_source)
    dtype = resolve_dtype(args, device)
    if args.attention != "auto":  # refused now, where this machine does not have it
        select_backend(args.attention, device, attention_spec(target.config, dtype))
    return Plan(
        args=args,
        sampling=sampling,
        draft=draft,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(args.kv_dtype, dtype),
        target=target,
        draft_source=draft_source,
        dataset=resolve_dataset(args.dataset, target),
        n_prompts=n_prompts,
        capacity=capacity,
        group=group,
        draft_group=draft_group,
    )


def _rank_groups(
    args: argparse.Namespace, target: ModelSource, draft_source: ModelSource | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that hold the target, and those that hold a standalone draft."""
    if "rank_group" not in args:
        require_single_process()
        return (LEADER,), (LEADER,)
    group = check_rank_group(args.rank_group, world_size())
    check_count(target.config, len(group), "--rank_group (all ranks that torchrun started, if not given)")
    if draft_source is None:
        return group, group
    draft_group = check_draft_ranks(args.draft_ranks, group)
    check_count(draft_source.config, len(draft_group), "--draft_ranks")
    return group, draft_group


def require_room(plan: Plan) -> None:
    """Raise OutOfMemoryError if the largest shard, on each rank of this machine, does not fit, or ConfigError for the
    prompts."""
    require_memory(memory_plan(plan), plan.args.B, room(plan), plan.device)
    if plan.n_prompts * plan.args.prefix_len > MOST_PROMPT_TOKENS:
        raise ConfigError(
            "there are too many prompt tokens to hold",
            where="--num_prompts (--B, if not given) and --prefix_len",
            seen=f"{plan.n_prompts} x {plan.args.prefix_len}",
            required=f"<= {MOST_PROMPT_TOKENS} tokens",
            fix="ask for fewer prompts",
        )


def room(plan: Plan) -> int:
    """Bytes that each rank of this machine may take."""
    return available_bytes(plan.device) // (local_world_size() if plan.device == "cpu" else 1)


def memory_plan(plan: Plan) -> MemoryPlan:
    """What the rank with the largest shard needs."""
    args, draft, config = plan.args, plan.draft, plan.target.config
    largest = _largest_shard(config, len(plan.group))
    footprint = None
    if draft and draft.dtype is not None:
        source = plan.draft_source
        draft_config = _largest_shard(source.config, len(plan.draft_group)) if source else largest
        if draft.layers is not None:
            draft_config = replace(draft_config, n_layer=len(draft.layers))
        shares_weights = source is None and shares_target(draft, plan.dtype, args.quantize)
        footprint = DraftFootprint(
            draft_config,
            draft.dtype,
            draft.capacities,
            shares_weights,
            draft.quantize,
            draft.kv_dtype,
            observed=draft.window or 0,
            prefills=source is not None,
            dequantizes=_dequantizes(plan, draft_config, draft.dtype, draft.kv_dtype, draft.positions == "cache"),
        )
    return plan_memory(
        largest,
        dtype=plan.dtype,
        draft=footprint,
        device=plan.device,
        capacity=plan.capacity,
        block=draft.gamma + 1 if draft else 1,
        prefill_chunk=min(prefill_chunk_of(torch.device(plan.device)), plan.capacity),
        sampling=plan.sampling.params,
        vocab_size=config.vocab_size,
        quantize=args.quantize,
        kv_dtype=plan.kv_dtype,
        dequantizes=_dequantizes(plan, largest, plan.dtype, plan.kv_dtype),
        captured_rows=_captured_rows(plan),
        n_communicator=len({group for group in (plan.group, plan.draft_group) if len(group) > 1}),
    )


def _captured_rows(plan: Plan) -> int:
    """How many `[V]` of logits, and of laws to reject by, CUDA graphs keep for a row while the longest round runs.

    Those of all other rounds that may be chosen, and of the baseline's.
    """
    draft = plan.draft
    if draft is None or plan.device == "cpu" or plan.args.no_cuda_graphs:
        return 0
    gammas = [0, *([0] if draft.automatic else []), *(gamma for _ in draft.capacities for gamma in draft.gammas)]
    gammas.remove(draft.gamma)
    return sum(gamma + 1 + (gamma if plan.sampling.mode == "rejection" else 0) for gamma in gammas)


def _dequantizes(
    plan: Plan, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None, turns_keys: bool = False
) -> Callable[[int], bool] | None:
    """Of the attention that a model of that shape gets over such entries; None unless they are 8-bit.

    turns_keys: keys are turned to their positions as they are read, dequantised for whatever attention.
    """
    if entries not in largest():
        return None
    if turns_keys:
        return lambda n_token: True
    return select_backend(plan.args.attention, plan.device, attention_spec(config, dtype), entries).backend.dequantizes


def _largest_shard(config: ModelConfig, count: int) -> ModelConfig:
    return shard_config(config, Shard(count - 1, count))


def resolve_positions(draft: DraftSettings, trained_context: int, run_length: int) -> DraftSettings:
    """`auto` is positions inside the cache where the run is longer than what the draft was trained on."""
    if draft.positions != "auto":
        return draft
    return replace(draft, positions="cache" if trained_context < run_length else "absolute")


def resolve_dataset(wanted: str, target: ModelSource) -> str | None:
    """`auto` is the built-in book for the built-in model, and PG-19 for every other. Random weights read no text."""
    if not target.has_text:
        return None
    if wanted != AUTO:
        return wanted
    return BUILT_IN if target.is_default else PG19


def remarks(plan: Plan) -> list[str]:
    """What a user should know of the run. Errors: ConfigError if the draft's vocabulary is another."""
    args, draft, source = plan.args, plan.draft, plan.draft_source
    said = []
    if not plan.target.has_text and (args.verify or args.dataset != AUTO):
        said.append("random weights read neither a checkpoint nor a text: --verify and --dataset have no effect")
    if draft and draft.policy in ("streaming", "snapkv") and draft.capacity >= args.prefix_len + args.gen_len:
        said.append(f"a budget of {draft.capacity} entries holds the whole context, so the draft misses nothing")
    if draft and draft.layers is not None:
        n_layer = plan.target.config.n_layer
        said.append(f"the draft runs {len(draft.layers)} of {n_layer} layers: {args.draft_layers}")
    if draft and source:
        tail = check_vocabulary(plan.target, source)
        if tail:
            said.append(tail)
        context, longest = source.config.max_context, args.prefix_len + args.gen_len + draft.gamma
        reach = min(draft.capacity, longest) if draft.positions == "cache" else longest
        if reach > context:
            said.append(f"{source.name} was trained on {context} positions, and is used up to {reach}")
        elif draft.positions == "cache":
            said.append(f"{source.name} counts positions inside its cache (trained context: {context})")
    return said


def shares_target(draft: DraftSettings, dtype: torch.dtype, quantize: str | None) -> bool:
    """Whether a self-draft runs the target's own weights."""
    return draft.dtype == dtype and draft.quantize == quantize


def _check_no_sliding_window(source: ModelSource) -> None:
    if source.config.sliding_window is not None:
        raise ConfigError(
            "SnapKV selects entries that a sliding window hides",
            where=f"--draft_policy on {source.name}",
            seen=f"snapkv, and a model with a sliding window of {source.config.sliding_window} tokens",
            required="a model that attends to the whole context",
            fix="use --draft_policy streaming",
        )


def _check_layers(layers: Sequence[int], n_layer: int) -> None:
    if max(layers) >= n_layer:
        raise ConfigError(
            "the draft's layers are not all layers of the model",
            where="--draft_layers",
            seen=f"layer {max(layers)}",
            required=f"0 to {n_layer - 1}",
            fix=f"name layers below {n_layer}, such as 0-{n_layer - 1}",
        )
