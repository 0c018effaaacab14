"""A run's set-up: ranks joined, models loaded, caches, prompts and drafter."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from common.errors import UserError
from common.say import dtype_name, say
from engine.bench.data import load_books, make_prompts
from engine.bench.memory import used_bytes
from engine.bench.model_source import ModelSource
from engine.bench.plan import Plan, remarks, require_room, resolve, shares_target
from engine.bench.settings import GREEDY, DraftSettings, Sampling
from engine.decoding import GenerateOutput
from engine.drafters import Drafter, NGram, SavedText, SelfSpeculation, StandaloneDraft
from engine.graphs import CudaGraphs
from engine.noise import compiled_source, in_passes
from engine.parallel.ranks import ModelRanks, Ranks, model_ranks, start_ranks
from engine.requests import check_prompt
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import FullKVCache, KVCache, SnapKVCache, StreamingKVCache
from models import ModelConfig, Transformer
from models.attention import select_backend
from models.checkpoints.tokenizer import Tokenizer
from models.llama import attention_spec, select_layers
from models.pointwise import Pointwise, compiled, use_pointwise
from models.pointwise_cpp import pointwise_beside


@dataclass(frozen=True)
class Setup:
    """A loaded model over an empty cache, the prompts to run, and what to draft with, if anything.

    On a rank that has no part of a standalone draft, `draft_model` is None. `startup_bytes`: what the process
    held of its device's memory before anything was loaded, on a CPU mostly Python and PyTorch themselves.
    `run`: what the record and the saved rows of this run have in common. `put_off`: errors that a run outlives,
    and ends with.
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
    dataset: str | None = None
    startup_bytes: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    put_off: list[UserError] = field(default_factory=list)

    @property
    def ranks(self) -> Ranks:
        return self.runner.ranks

    @property
    def name(self) -> str:
        return self.target.name

    def books(self) -> Iterator[str]:
        """Those of the data set, from the first on. For a target that has text."""
        assert self.dataset is not None, "random weights read no text"
        return load_books(self.dataset)


def prepare(args: argparse.Namespace, sampling: Sampling = GREEDY, draft: DraftSettings | None = None) -> Setup:
    """Check everything that can be wrong, cheapest first; then load the models and allocate the target's cache."""
    plan = resolve(args, sampling, draft)
    require_room(plan)
    ranks = _join_ranks(plan)
    if ranks.device.type == "cuda":  # graphs and kernels are made on the current device
        torch.cuda.set_device(ranks.device)
    startup_bytes = used_bytes(plan.device)
    target_ranks = model_ranks(ranks, plan.group)
    draft_ranks = model_ranks(ranks, plan.draft_group) if plan.draft_source else None
    # Found now, and read when the prompts are cut.
    books = load_books(plan.dataset) if plan.dataset is not None and ranks.leads else iter(())
    for remark in ranks.shared(lambda: remarks(plan)):
        say(f"note: {remark}")
    say(f"loading {plan.target.name} on {plan.device} as {dtype_name(plan.dtype)}")
    tokenizer = plan.target.tokenizer() if plan.target.has_text and ranks.leads else None
    prompts = ranks.shared(lambda: _prompts(plan, tokenizer, books))
    model = _load(plan, plan.target, plan.dtype, target_ranks, args.quantize)
    _choose_attention(plan, model, plan.kv_dtype, "attention")
    # Before the cache: a checkpoint that is being converted needs room that the cache takes later.
    draft_model = None
    if draft and draft_ranks is None:
        draft_model = load_draft_model(model, plan.target, target_ranks, draft, args)
    elif plan.draft_source and draft_ranks and draft_ranks.holds:
        assert draft is not None and draft.dtype is not None
        draft_model = _load(plan, plan.draft_source, draft.dtype, draft_ranks, draft.quantize)
    if draft_model is not None and draft is not None:
        _choose_attention(plan, draft_model, draft.kv_dtype, "the draft's attention")
    for part in filter(None, (model, draft_model)):
        use_pointwise(part, _compiled_for(part.config) if args.compile else pointwise_beside(part.backend))
    new_graphs = None if plan.device == "cpu" or args.no_cuda_graphs else CudaGraphs
    cache = FullKVCache(model.config, args.B, plan.capacity, device=plan.device, dtype=plan.kv_dtype)
    noise_source = compiled_source() if args.compile else in_passes
    runner = ModelRunner(model, cache, ranks=ranks, new_graphs=new_graphs, noise_source=noise_source)
    for index, prompt in enumerate(prompts):
        check_prompt(runner, index, prompt, args.gen_len, draft.gamma if draft else 0)
    return Setup(
        args=args,
        runner=runner,
        prompts=prompts,
        stop_tokens=plan.target.config.eos_tokens if args.stop_at_eos else (),
        tokenizer=tokenizer,
        target=plan.target,
        target_ranks=target_ranks,
        dtype=plan.dtype,
        sampling=sampling,
        draft=plan.draft,
        draft_model=draft_model,
        draft_source=plan.draft_source,
        draft_ranks=draft_ranks,
        dataset=plan.dataset,
        startup_bytes=startup_bytes,
    )


def _compiled_for(config: ModelConfig) -> Pointwise:
    return compiled(sizes=(config.dim, config.ffn_dim, config.n_head, config.n_kv_head, config.head_dim))


def _join_ranks(plan: Plan) -> Ranks:
    if len(plan.group) == 1:
        return Ranks(device=torch.device(plan.device))
    return start_ranks(plan.device, check=plan.args.check_ranks, timeout_seconds=plan.args.rank_timeout)


def _load(
    plan: Plan, source: ModelSource, dtype: torch.dtype, holders: ModelRanks, quantize: str | None
) -> Transformer:
    """The model, or what this rank holds of it."""
    exchange = holders if len(plan.group) > 1 else None
    return source.load(plan.device, dtype, plan.args.attention, exchange=exchange, quantize=quantize)


def _choose_attention(plan: Plan, model: Transformer, entries: torch.dtype | None, whose: str) -> None:
    """Now that its cache's entries are known, and what it holds of its heads; said with the reason."""
    spec = attention_spec(model.config, model.dtype)
    model.backend, why = select_backend(plan.args.attention, plan.device, spec, entries)
    say(f"{whose}: {model.backend.name} ({why})")


def make_drafters(setup: Setup, baseline: GenerateOutput | None) -> list[Drafter]:
    """One drafter, or with `--draft_budget auto` one of each budget, the largest first."""
    assert setup.draft is not None, "prepare() was called without draft settings"
    each = (replace(setup, draft=replace(setup.draft, capacity=budget)) for budget in setup.draft.capacities)
    return [make_drafter(one, baseline) for one in each]


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
    cache = draft_cache(draft, model.config, setup.args.B, runner.device)
    return SelfSpeculation(runner, cache, draft.gamma, model, draft.layers)


def _draft_runner(setup: Setup, draft: DraftSettings) -> ModelRunner | RemoteRunner:
    """A standalone draft's; one that only listens where other ranks hold the draft."""
    source, ranks, model = setup.draft_source, setup.draft_ranks, setup.draft_model
    assert source is not None and ranks is not None and draft.dtype is not None
    if model is None:
        return RemoteRunner(source.config, draft.dtype, setup.args.B, setup.ranks, ranks)
    return ModelRunner(model, draft_cache(draft, model.config, setup.args.B, setup.runner.device), ranks=setup.ranks)


def draft_cache(draft: DraftSettings, config: ModelConfig, n_rows: int, device: torch.device) -> KVCache:
    """An empty cache of the draft's policy and budget, for a model of that configuration."""
    kv_dtype = draft.kv_dtype or draft.dtype
    assert kv_dtype is not None
    if draft.policy == "streaming":
        assert draft.n_sink is not None
        in_cache = draft.positions == "cache"
        return StreamingKVCache(config, n_rows, draft.capacity, draft.n_sink, device, kv_dtype, in_cache)
    if draft.policy == "snapkv":
        assert draft.window is not None
        return SnapKVCache(config, n_rows, draft.capacity, draft.window, device, kv_dtype)
    return FullKVCache(config, n_rows, draft.capacity, device, kv_dtype)


def load_draft_model(
    model: Transformer,
    target: ModelSource,
    target_ranks: ModelRanks,
    draft: DraftSettings,
    args: argparse.Namespace,
) -> Transformer | None:
    """What self-speculation drafts with: a copy of the weights in another form, or some of the target's layers.

    None where it is the target, or where nothing of it drafts.
    """
    if draft.kind != "self" or draft.dtype is None:
        return None
    if not shares_target(draft, model.dtype, args.quantize):
        exchange = target_ranks if len(target_ranks.ranks) > 1 else None
        device = str(target_ranks.device)
        return target.load(device, draft.dtype, args.attention, draft.layers, exchange, draft.quantize)
    return None if draft.layers is None else select_layers(model, draft.layers)


def _prompts(plan: Plan, tokenizer: Tokenizer | None, books: Iterator[str]) -> list[list[int]]:
    """Stretches of the data set; random tokens for random weights, which have no tokenizer."""
    prefix_len = plan.args.prefix_len
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        shape = (plan.n_prompts, prefix_len)
        return torch.randint(plan.target.config.vocab_size, shape, generator=generator).tolist()
    say(f"tokenising {plan.n_prompts} prompts of {prefix_len} tokens from {plan.dataset}")
    prompts = make_prompts(books, tokenizer, n_prompts=plan.n_prompts, prefix_len=prefix_len)
    plan.target.check_tokens(prompts)
    return prompts
