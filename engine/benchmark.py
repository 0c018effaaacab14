"""What the benchmark scripts share: set-up, and the passes over one prefilled state."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine.arguments import GREEDY, DraftSettings, Sampling, require_at_least, resolve_device, resolve_dtype
from engine.data import load_books, make_prompts
from engine.decoding import GenerateOutput, generate
from engine.distributed import require_single_process
from engine.drafters import Drafter, NGram, SavedText, SelfSpeculation
from engine.memory import available_bytes, plan_memory, require_memory
from engine.provenance import require_appendable
from engine.requests import check_prompt
from engine.runner import PREFILL_CHUNK, ModelRunner
from engine.timing import PhaseTimer
from kv_cache import FullKVCache, KVCache, StreamingKVCache
from kv_cache.errors import CheckpointError, ConfigError, UserError
from models import ModelConfig, Transformer, load_model
from models.attention import select_backend
from models.default_model import DEFAULT_CHECKPOINT, DEFAULT_NAME
from models.presets import preset_config
from models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Setup:
    """A loaded model over an empty cache, the prompts to run, and what to draft with, if anything."""

    args: argparse.Namespace
    runner: ModelRunner
    prompts: list[list[int]]
    stop_tokens: tuple[int, ...]
    tokenizer: Tokenizer | None
    name: str
    dtype: torch.dtype
    sampling: Sampling
    draft: DraftSettings | None
    draft_model: Transformer | None


def prepare(args: argparse.Namespace, sampling: Sampling = GREEDY, draft: DraftSettings | None = None) -> Setup:
    """Check everything that can be wrong, cheapest first; then load the model and allocate its cache."""
    require_single_process()
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
    require_appendable(args.output)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args, device)
    config, name = _config_and_name(args)
    capacity = args.prefix_len + args.gen_len + gamma + 1
    if capacity > config.max_context:
        raise ConfigError(
            "prompt + new tokens + gamma + 1 exceeds the model's context",
            where=f"--prefix_len, --gen_len and --gamma on {name}",
            seen=f"{args.prefix_len} + {args.gen_len} + {gamma} + 1 = {capacity} tokens",
            required=f"<= {config.max_context}",
            fix=f"use --prefix_len {max(1, config.max_context - capacity + args.prefix_len)} or less",
        )
    plan = plan_memory(
        config,
        dtype=dtype,
        draft_dtype=draft.dtype if draft else None,
        device=device,
        capacity=capacity,
        draft_capacity=draft.capacity if draft else 0,
        block=gamma + 1,
        prefill_chunk=PREFILL_CHUNK,
        sampling=sampling.params,
    )
    require_memory(plan, args.B, available_bytes(device), device)

    tokenizer, prompts = _prompts(args, config, n_prompts)
    say(f"loading {name} on {device} as {dtype_name(dtype)}, attention {select_backend(args.attention).name}")
    if draft and draft.policy == "streaming" and draft.capacity >= args.prefix_len + args.gen_len:
        say(f"note: a budget of {draft.capacity} entries holds the whole context, so the draft misses nothing")
    model = _load(args, config, device, dtype)
    # Before the cache: a checkpoint that is being converted needs room that the cache takes later.
    draft_model = load_draft_model(args, config, device, draft, dtype) if draft else None
    cache = FullKVCache(config, args.B, capacity, device=device, dtype=dtype)
    runner = ModelRunner(model, cache)
    for index, prompt in enumerate(prompts):
        check_prompt(runner, index, prompt, args.gen_len, gamma)
    stop_tokens = config.eos_tokens if args.stop_at_eos else ()
    return Setup(args, runner, prompts, stop_tokens, tokenizer, name, dtype, sampling, draft, draft_model)


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
    return SelfSpeculation(runner, _draft_cache(setup, draft), draft.gamma, setup.draft_model)


def _draft_cache(setup: Setup, draft: DraftSettings) -> KVCache:
    config, device = setup.runner.model.config, setup.runner.device
    assert draft.dtype is not None
    if draft.policy == "streaming":
        assert draft.n_sink is not None
        return StreamingKVCache(config, setup.args.B, draft.capacity, draft.n_sink, device, draft.dtype)
    return FullKVCache(config, setup.args.B, draft.capacity, device, draft.dtype)


def load_draft_model(
    args: argparse.Namespace, config: ModelConfig, device: str, draft: DraftSettings, target_dtype: torch.dtype
) -> Transformer | None:
    """The draft's own copy of the weights; None where it shares the target's."""
    return None if draft.dtype in (None, target_dtype) else _load(args, config, device, draft.dtype)


def _load(args: argparse.Namespace, config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    model = load_model(
        args.model,
        device=device,
        dtype=dtype,
        load_format=args.load_format,
        config=config if args.load_format == "dummy" else None,
    )
    model.backend = select_backend(args.attention)
    return model


def _config_and_name(args: argparse.Namespace) -> tuple[ModelConfig, str]:
    path = Path(args.model)
    folder = path if path.is_dir() else path.parent
    is_default = folder.resolve() == DEFAULT_CHECKPOINT.resolve()
    if args.load_format == "dummy" and args.model_name:
        return preset_config(args.model_name), args.model_name
    if is_default and not (folder / "model.pth").exists():
        raise CheckpointError(
            "the built-in default model has not been fetched and converted",
            where=str(folder),
            seen="no model.pth",
            required="the converted default checkpoint",
            fix="run `python download.py` and `python convert_hf_checkpoint.py`, or `make demo`",
        )
    if not folder.is_dir():
        raise CheckpointError(
            "there is no such checkpoint",
            where="--model",
            seen=args.model,
            required="a model.pth, or its folder",
            fix="download it (download.py), then convert it (convert_hf_checkpoint.py --checkpoint_dir FOLDER)",
        )
    config = ModelConfig.from_json(folder / "config.json")
    return config, args.model_name or (DEFAULT_NAME if is_default else folder.resolve().name)


def _prompts(args: argparse.Namespace, config: ModelConfig, n_prompts: int) -> tuple[Tokenizer | None, list[list[int]]]:
    """Stretches of the data set; random tokens for random weights, which have no tokenizer."""
    if args.load_format == "dummy":
        generator = torch.Generator().manual_seed(0)
        shape = (n_prompts, args.prefix_len)
        return None, torch.randint(config.vocab_size, shape, generator=generator).tolist()
    path = Path(args.model)
    tokenizer = load_tokenizer(path if path.is_dir() else path.parent)
    say(f"tokenising {n_prompts} prompts of {args.prefix_len} tokens from {args.dataset}")
    books = load_books(args.dataset)
    return tokenizer, make_prompts(books, tokenizer, n_prompts=n_prompts, prefix_len=args.prefix_len)


def say(message: str) -> None:
    """Progress and remarks go to stderr: stdout is for results, its last line for the record."""
    print(message, file=sys.stderr, flush=True)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def prefill(setup: Setup) -> float:
    """Prefill the prompts that start in the slots, with a progress bar; returns seconds."""
    first = setup.prompts[: setup.runner.cache.max_batch]
    started = time.perf_counter()
    with _bar("prefill", sum(map(len, first))) as bar:
        for row, prompt in enumerate(first):
            setup.runner.prefill_row(row, prompt, bar.update)
    if setup.runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def decode(setup: Setup, name: str, drafter: Drafter | None = None, timer: PhaseTimer | None = None) -> GenerateOutput:
    """One pass over the prompts from the prefilled state, with a progress bar.

    Raises UserError naming row and position if any row's logits were not finite.
    """
    with _bar(name, len(setup.prompts) * setup.args.gen_len) as bar:
        output = generate(
            setup.runner,
            setup.prompts,
            max_new_tokens=setup.args.gen_len,
            drafter=drafter,
            sampling=setup.sampling.params,
            verification=setup.sampling.mode,
            stop_tokens=setup.stop_tokens,
            progress=_DecodeProgress(bar),
            phase=timer,
        )
    broken = [error for error in output.errors if error]
    if broken:
        raise UserError(
            "the model's logits are not finite",
            where=name,
            seen="; ".join(broken[:8]),
            required=f"finite logits in all {len(output.errors)} rows",
            fix="check the checkpoint (convert again), or use a wider --dtype (float32)",
        )
    return output


@dataclass(frozen=True)
class _DecodeProgress:
    bar: tqdm

    def prefilled(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("refilling a slot", refresh=True)

    def emitted(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update(n_tokens)


def _bar(name: str, total: int) -> tqdm:
    return tqdm(total=total, desc=f"{name:<12}", unit="tok", file=sys.stderr, dynamic_ncols=True)
