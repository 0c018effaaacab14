"""A run's set-up: checked flags, ranks, models, caches, prompts and drafter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.arguments import GREEDY, DraftSettings, Sampling, require_at_least, resolve_device, resolve_dtype
from engine.data import load_books, make_prompts
from engine.decoding import GenerateOutput
from engine.distributed import (
    LEADER,
    ModelRanks,
    Ranks,
    check_draft_ranks,
    check_rank_group,
    local_world_size,
    model_ranks,
    require_single_process,
    start_ranks,
    world_size,
)
from engine.drafters import Drafter, NGram, SavedText, SelfSpeculation, StandaloneDraft
from engine.memory import DraftFootprint, available_bytes, plan_memory, require_memory, used_bytes
from engine.model_source import ModelSource, check_vocabulary, find_model
from engine.provenance import require_appendable
from engine.requests import check_prompt
from engine.runner import PREFILL_CHUNK, ModelRunner, RemoteRunner
from engine.say import dtype_name, say
from kv_cache import FullKVCache, KVCache, StreamingKVCache
from kv_cache.errors import ConfigError
from models import ModelConfig, Transformer
from models.attention import select_backend
from models.llama import select_layers
from models.tensor_parallel import Shard, check_count, shard_config
from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Setup:
    """A loaded model over an empty cache, the prompts to run, and what to draft with, if anything.

    On a rank that has no part of a standalone draft, `draft_model` is None. `startup_bytes`: what the process
    held of its device's memory before anything was loaded, on a CPU mostly Python and PyTorch themselves.
    """

    args: argparse.Namespace
    runner: ModelRunner
    prompts: list[list[int]]
    stop_tokens: tuple[int, ...]
    tokenizer: Tokenizer | None
    target: ModelSource
    target_ranks: ModelRanks
    dtype: torch.dtype
    sampling: Sampling
    draft: DraftSettings | None
    draft_model: Transformer | None
    draft_source: ModelSource | None = None
    draft_ranks: ModelRanks | None = None
    startup_bytes: int = 0

    @property
    def ranks(self) -> Ranks:
        return self.runner.ranks

    @property
    def name(self) -> str:
        return self.target.name


def prepare(args: argparse.Namespace, sampling: Sampling = GREEDY, draft: DraftSettings | None = None) -> Setup:
    """Check everything that can be wrong, cheapest first; then load the model and allocate its cache."""
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
    device = resolve_device(args.device)
    dtype = resolve_dtype(args, device)
    target = find_model(args.model, args.load_format, args.model_name, "the target (--model, or --target)")
    config = target.config
    capacity = args.prefix_len + args.gen_len + gamma + 1
    if capacity > config.max_context:
        raise ConfigError(
            "prompt + new tokens + gamma + 1 exceeds the model's context",
            where=f"--prefix_len, --gen_len and --gamma on {target.name}",
            seen=f"{args.prefix_len} + {args.gen_len} + {gamma} + 1 = {capacity} tokens",
            required=f"<= {config.max_context}",
            fix=f"use --prefix_len {max(1, config.max_context - capacity + args.prefix_len)} or less",
        )
    draft_source = None
    if draft and draft.model is not None:
        draft_source = find_model(draft.model, args.load_format, None, "--model")
        draft = _resolve_positions(draft, draft_source.config.max_context, capacity)
    elif draft and draft.layers is not None:
        _check_layers(draft.layers, config.n_layer)
    ranks, group, draft_group = _join_ranks(args, device, config, draft_source)
    _require_memory(args, sampling, draft, config, draft_source, device, dtype, capacity, len(group), len(draft_group))

    startup_bytes = used_bytes(device)
    target_ranks = model_ranks(ranks, group)
    draft_ranks = model_ranks(ranks, draft_group) if draft_source else None
    for remark in ranks.shared(lambda: _remarks(args, draft, target, draft_source)):
        say(f"note: {remark}")
    say(f"loading {target.name} on {device} as {dtype_name(dtype)}, attention {select_backend(args.attention).name}")
    tokenizer = target.tokenizer() if target.has_text and ranks.leads else None
    prompts = ranks.shared(lambda: _prompts(args, config, tokenizer, n_prompts))
    model = target.load(device, dtype, args.attention, exchange=target_ranks if ranks.size > 1 else None)
    # Before the cache: a checkpoint that is being converted needs room that the cache takes later.
    draft_model = load_draft_model(model, target, target_ranks, draft, args.attention) if draft else None
    if draft_source and draft_ranks and draft_ranks.holds:
        assert draft is not None and draft.dtype is not None
        exchange = draft_ranks if ranks.size > 1 else None
        draft_model = draft_source.load(device, draft.dtype, args.attention, exchange=exchange)
    cache = FullKVCache(model.config, args.B, capacity, device=device, dtype=dtype)
    runner = ModelRunner(model, cache, ranks=ranks)
    for index, prompt in enumerate(prompts):
        check_prompt(runner, index, prompt, args.gen_len, gamma)
    return Setup(
        args=args,
        runner=runner,
        prompts=prompts,
        stop_tokens=config.eos_tokens if args.stop_at_eos else (),
        tokenizer=tokenizer,
        target=target,
        target_ranks=target_ranks,
        dtype=dtype,
        sampling=sampling,
        draft=draft,
        draft_model=draft_model,
        draft_source=draft_source,
        draft_ranks=draft_ranks,
        startup_bytes=startup_bytes,
    )


def _join_ranks(
    args: argparse.Namespace, device: str, config: ModelConfig, draft_source: ModelSource | None
) -> tuple[Ranks, tuple[int, ...], tuple[int, ...]]:
    """The processes of this run, the ranks that hold the target, and those that hold a standalone draft."""
    if "rank_group" not in args:
        require_single_process()
        return Ranks(device=torch.device(device)), (LEADER,), (LEADER,)
    group = check_rank_group(args.rank_group, world_size())
    check_count(config, len(group), "--rank_group")
    draft_group = group
    if draft_source:
        draft_group = check_draft_ranks(args.draft_ranks, group)
        check_count(draft_source.config, len(draft_group), "--draft_ranks")
    ranks = start_ranks(device, check=args.check_ranks, timeout_seconds=args.rank_timeout)
    return ranks, group, draft_group


def _require_memory(
    args: argparse.Namespace,
    sampling: Sampling,
    draft: DraftSettings | None,
    config: ModelConfig,
    draft_source: ModelSource | None,
    device: str,
    dtype: torch.dtype,
    capacity: int,
    n_shards: int,
    n_draft_shards: int,
) -> None:
    """Raise OutOfMemoryError if the largest shard, on each rank of this machine, does not fit."""
    largest = shard_config(config, Shard(n_shards - 1, n_shards))
    footprint = None
    if draft and draft.dtype is not None:
        draft_config = (
            shard_config(draft_source.config, Shard(n_draft_shards - 1, n_draft_shards)) if draft_source else largest
        )
        if draft.layers is not None:
            draft_config = replace(draft_config, n_layer=len(draft.layers))
        shares_weights = draft_source is None and draft.dtype == dtype
        footprint = DraftFootprint(draft_config, draft.dtype, draft.capacity, shares_weights)
    plan = plan_memory(
        largest,
        dtype=dtype,
        draft=footprint,
        device=device,
        capacity=capacity,
        block=draft.gamma + 1 if draft else 1,
        prefill_chunk=PREFILL_CHUNK,
        sampling=sampling.params,
        vocab_size=config.vocab_size,
    )
    sharers = local_world_size() if device == "cpu" else 1
    require_memory(plan, args.B, available_bytes(device) // sharers, device)


def _resolve_positions(draft: DraftSettings, trained_context: int, run_length: int) -> DraftSettings:
    """`auto` is positions inside the cache where the run is longer than what the draft was trained on."""
    if draft.positions != "auto":
        return draft
    return replace(draft, positions="cache" if trained_context < run_length else "absolute")


def _remarks(
    args: argparse.Namespace, draft: DraftSettings | None, target: ModelSource, draft_source: ModelSource | None
) -> list[str]:
    """What a user should know of the draft. Errors: ConfigError if its vocabulary is another."""
    remarks = []
    if getattr(args, "compile", False):
        remarks.append("--compile has no effect yet: this runs eagerly")
    if draft and draft.policy == "streaming" and draft.capacity >= args.prefix_len + args.gen_len:
        remarks.append(f"a budget of {draft.capacity} entries holds the whole context, so the draft misses nothing")
    if draft and draft.layers is not None:
        remarks.append(f"the draft runs {len(draft.layers)} of {target.config.n_layer} layers ({args.draft_layers})")
    if draft and draft_source:
        tail = check_vocabulary(target, draft_source)
        if tail:
            remarks.append(tail)
        context, longest = draft_source.config.max_context, args.prefix_len + args.gen_len + draft.gamma
        reach = min(draft.capacity, longest) if draft.positions == "cache" else longest
        if reach > context:
            remarks.append(f"{draft_source.name} was trained on {context} positions, and is used up to {reach}")
        elif draft.positions == "cache":
            remarks.append(f"{draft_source.name} counts positions inside its cache (trained context: {context})")
    return remarks


def _check_layers(layers: Sequence[int], n_layer: int) -> None:
    if max(layers) >= n_layer:
        raise ConfigError(
            "the draft's layers are not all layers of the model",
            where="--draft_layers",
            seen=f"layer {max(layers)}",
            required=f"0 to {n_layer - 1}",
            fix=f"name layers below {n_layer}, such as 0-{n_layer - 1}",
        )


def make_drafter(setup: Setup, baseline: GenerateOutput | None) -> Drafter:
    """The drafter of the set-up's draft settings, over an empty cache; an oracle drafts the baseline's output."""
    draft, runner = setup.draft, setup.runner
    assert draft is not None, "prepare() was called without draft settings"
    if draft.kind == "ngram":
        assert draft.max_ngram is not None
        return NGram(runner, draft.gamma, draft.max_ngram)
    if draft.kind == "oracle":
        assert baseline is not None, "draft_settings() admits an oracle only beside a baseline"
        return SavedText(runner, dict(enumerate(baseline.tokens)), draft.gamma)
    if draft.kind == "standalone":
        return StandaloneDraft(_draft_runner(setup, draft), draft.gamma)
    model = setup.draft_model or runner.model
    return SelfSpeculation(runner, _draft_cache(setup, draft, model.config), draft.gamma, model, draft.layers)


def _draft_runner(setup: Setup, draft: DraftSettings) -> ModelRunner | RemoteRunner:
    """A standalone draft's; one that only listens where other ranks hold the draft."""
    source, ranks, model = setup.draft_source, setup.draft_ranks, setup.draft_model
    assert source is not None and ranks is not None and draft.dtype is not None
    if model is None:
        return RemoteRunner(source.config, draft.dtype, setup.args.B, setup.ranks, ranks)
    return ModelRunner(model, _draft_cache(setup, draft, model.config), ranks=setup.ranks)


def _draft_cache(setup: Setup, draft: DraftSettings, config: ModelConfig) -> KVCache:
    device = setup.runner.device
    assert draft.dtype is not None
    if draft.policy == "streaming":
        assert draft.n_sink is not None
        in_cache = draft.positions == "cache"
        return StreamingKVCache(config, setup.args.B, draft.capacity, draft.n_sink, device, draft.dtype, in_cache)
    return FullKVCache(config, setup.args.B, draft.capacity, device, draft.dtype)


def load_draft_model(
    model: Transformer, target: ModelSource, target_ranks: ModelRanks, draft: DraftSettings, attention: str
) -> Transformer | None:
    """What self-speculation drafts with: a copy of the weights in another dtype, or some of the target's layers.

    None where it is the target, or where nothing of it drafts.
    """
    if draft.kind != "self" or draft.dtype is None:
        return None
    if draft.dtype != model.dtype:
        exchange = target_ranks if len(target_ranks.ranks) > 1 else None
        return target.load(str(target_ranks.device), draft.dtype, attention, draft.layers, exchange)
    return None if draft.layers is None else select_layers(model, draft.layers)


def _prompts(
    args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None, n_prompts: int
) -> list[list[int]]:
    """Stretches of the data set; random tokens for random weights, which have no tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        shape = (n_prompts, args.prefix_len)
        return torch.randint(config.vocab_size, shape, generator=generator).tolist()
    say(f"tokenising {n_prompts} prompts of {args.prefix_len} tokens from {args.dataset}")
    books = load_books(args.dataset)
    return make_prompts(books, tokenizer, n_prompts=n_prompts, prefix_len=args.prefix_len)
