"""Set-ups that several cells share: one model over one filled cache, under different drafts and sampling."""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine import arguments, benchmark
from engine.drafters import Drafter
from engine.runner import Prefilled
from engine.setup import Setup, load_draft_model, make_drafter, prepare
from engine.timing import PhaseTimer
from models.pointwise import use_pointwise
from reproduce.gpu_parts.cells import Options


def make_setup(options: Options, **flags: Any) -> Setup:
    """`prepare` for the flags of the self-speculation benchmark; on a GPU compiled, and with graphs."""
    parser = arguments.Parser()
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    arguments.add_pass_arguments(parser)
    args = parser.parse_args([])
    for name, value in ({"device": options.device, "compile": options.on_cuda} | flags).items():
        assert hasattr(args, name), f"no flag --{name}"
        setattr(args, name, value)
    return prepare(args, arguments.sampling_settings(args), arguments.draft_settings(args))


def under(setup: Setup, **flags: Any) -> Setup:
    """The same model, cache and prompts under other draft and sampling flags."""
    args = copy.copy(setup.args)
    for name, value in flags.items():
        assert hasattr(args, name), f"no flag --{name}"
        setattr(args, name, value)
    draft, held, model = arguments.draft_settings(args), setup.draft, setup.runner.model
    draft_model = setup.draft_model
    if held is None or (held.dtype, held.quantize) != (draft.dtype, draft.quantize):
        draft_model = load_draft_model(model, setup.target, setup.target_ranks, draft, args)
        if draft_model is not None:
            use_pointwise(draft_model, model.pointwise)
    sampling = arguments.sampling_settings(args)
    return dataclasses.replace(setup, args=args, draft=draft, draft_model=draft_model, sampling=sampling)


# A model for a CPU and a test, of kinds of layers that quantise.
TINY = "tiny"
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def dummy_setup(options: Options, model: str, **flags: Any) -> Setup:
    """Random weights of a published shape, or of TINY_CONFIG, over a cache of random entries."""
    with tempfile.TemporaryDirectory() as folder:
        source = {"model_name": model}
        if model == TINY:
            shape = Path(folder) / TINY
            shape.mkdir()
            (shape / "config.json").write_text(json.dumps(TINY_CONFIG))
            source = {"model": str(shape)}
        setup = make_setup(options, load_format="dummy", **source, **flags)
    fill_with_noise(setup)
    return setup


@torch.inference_mode()
def fill_with_noise(setup: Setup) -> None:
    """Stand in for a prefill: every row holds random keys and values at the positions of its prompt."""
    cache, model = setup.runner.cache, setup.runner.model
    for storage, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        if scales is None:
            storage.normal_()
        else:
            storage.view(torch.int8).random_(-64, 65)
            scales.fill_(1 / 64)
    for row, prompt in enumerate(setup.prompts):
        cache.reset_row(row)
        cache.positions[row, : len(prompt)] = torch.arange(len(prompt), device=cache.device)
        logits = torch.randn(model.config.vocab_size, device=cache.device, dtype=model.dtype)
        cache.notes[row] = Prefilled(model, tuple(prompt), logits, None)


def with_drafter(setup: Setup, measure: Callable[[Drafter], Any]) -> Any:
    """What `measure` makes of the set-up's drafter, warmed up; its cache and its graphs are let go afterwards."""
    drafter = make_drafter(setup, None)
    try:
        benchmark.warm_up(setup, drafter)
        return measure(drafter)
    finally:
        forget(setup, drafter)


def forget(setup: Setup, drafter: Drafter | None) -> None:
    """Let go of the graphs that were captured for a drafter, with all that they hold."""
    captured = setup.runner.captured
    for key in [key for key in captured if isinstance(key, tuple) and key[0] is drafter]:
        del captured[key]


def speculation_passes(setup: Setup, drafter: Drafter) -> tuple[Any, tuple[PhaseTimer, Any]]:
    """One pass that is timed as a whole, and one whose phases are."""
    speculative = benchmark.decode(setup, "speculation", drafter)
    timer = PhaseTimer(setup.runner.device)
    return speculative, (timer, benchmark.decode(setup, "phase times", drafter, timer))
