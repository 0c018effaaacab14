"""Plain decoding against Hugging Face transformers on a CPU: same weights, same KV, interleaved turns.

    python reproduce/cpu_peers.py --output reproduce/results/cpu_peers.jsonl

The prompt is prefilled once, by Foretoken; its keys and values are copied into transformers' caches.
Then the peers take turns: each generates a few tokens and goes on from there at its next turn. A peer's
figure is the median time between two of its tokens. --schemes adds our own model in 8 or 4 bits over the same KV,
which as another model may write another text. Needs requirements-dev.txt.
"""

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import torch
from engine.bench.setup import Setup, prepare

from common.exit import exit_on_user_error
from common.jsonl import publish
from common.provenance import provenance
from engine import generate
from engine.bench import arguments
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.runner import ModelRunner
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.quantize import SCHEMES

Turn = Callable[[], tuple[list[float], list[int]]]


class Clock:
    """A stopping criterion of transformers that never stops, and notes the time of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def steps_ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in zip(self.times, self.times[1:], strict=False)]


def transformers_turn(model, cache, setup: Setup, n_tokens: int) -> Turn:
    """A turn of `generate` over `cache`, which holds the KV of every token but the last."""
    state = {"tokens": torch.tensor(setup.prompts)}

    def turn() -> tuple[list[float], list[int]]:
        clock, tokens = Clock(), state["tokens"]
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=n_tokens,
            do_sample=False,
            eos_token_id=None,
            stopping_criteria=[clock],
        )
        state["tokens"] = out
        return clock.steps_ms(), out[0, tokens.shape[1] :].tolist()

    return turn


def foretoken_turn(setup: Setup, n_tokens: int) -> Turn:
    """Ours: the same tokens from the rows' own KV, and like the peers with more context every turn."""
    state = {"done": 0}

    def turn() -> tuple[list[float], list[int]]:
        out = generate(setup.runner, setup.prompts, max_new_tokens=state["done"] + n_tokens)
        new = slice(state["done"], state["done"] + n_tokens)
        state["done"] += n_tokens
        return [1e3 * r.seconds for r in out.stats.rounds][new], out.tokens[0][new]

    return turn


def quantised(setup: Setup, scheme: str) -> Setup:
    """Our model with weights in that scheme over a copy of the same KV: another model, so its tokens may differ."""
    model = setup.target.load("cpu", setup.dtype, setup.args.attention, quantize=scheme)
    cache = copy.copy(setup.runner.cache)
    for name, held in vars(cache).items():
        if isinstance(held, torch.Tensor):
            setattr(cache, name, held.clone())
    cache.notes = {row: dataclasses.replace(note, model=model) for row, note in cache.notes.items()}
    return dataclasses.replace(setup, runner=ModelRunner(model, cache))


def fill(cache, setup: Setup) -> None:
    """Copy the prefilled prompts, less their last token, into a transformers cache."""
    kept = setup.args.prefix_len - 1
    ours = setup.runner.cache
    for layer in range(setup.runner.model.config.n_layer):
        cache.update(ours.keys[layer][:, :, :kept].contiguous(), ours.values[layer][:, :, :kept].contiguous(), layer)


def main() -> None:
    parser = arguments.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--B", type=int, default=8, help="rows decoded together")
    parser.add_argument("--prefix_len", type=int, default=7500, help="prompt tokens per row")
    parser.add_argument("--turns", type=int, default=4, help="interleaved turns of every peer")
    parser.add_argument("--tokens_per_turn", type=int, default=6)
    parser.add_argument("--schemes", nargs="*", default=[], choices=SCHEMES, help="also our model so quantised")
    parser.add_argument("--output", help="append the JSON record to this file")
    ours = parser.parse_args()
    common = argparse.ArgumentParser()
    arguments.add_common_arguments(common)
    args = common.parse_args(["--device", "cpu", "--dtype", "float32"], namespace=ours)
    args.gen_len = args.turns * args.tokens_per_turn
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
    from transformers import __version__ as transformers_version

    setup = prepare(args)
    prefill_seconds = benchmark.prefill(setup)
    gguf = next(DEFAULT_CHECKPOINT.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=setup.dtype, attn_implementation="sdpa"
    )
    dynamic = DynamicCache(config=model.config)
    static = StaticCache(config=model.config, max_cache_len=args.prefix_len + args.gen_len + 1)
    with torch.inference_mode():
        fill(dynamic, setup)
        fill(static, setup)
        peers = {
            "foretoken": foretoken_turn(setup, args.tokens_per_turn),
            "transformers, static cache, sdpa": transformers_turn(model, static, setup, args.tokens_per_turn),
            "transformers, default cache": transformers_turn(model, dynamic, setup, args.tokens_per_turn),
        }
        for scheme in args.schemes:
            peers[f"foretoken, {scheme}"] = foretoken_turn(quantised(setup, scheme), args.tokens_per_turn)
        steps: dict[str, list[float]] = {name: [] for name in peers}
        tokens: dict[str, list[int]] = {name: [] for name in peers}
        for _ in range(args.turns):
            for name, turn in peers.items():
                times, new = turn()
                steps[name] += times
                tokens[name] += new
    own_models = [f"foretoken, {scheme}" for scheme in args.schemes]
    medians = {name: median(times) for name, times in steps.items()}
    record = {
        "benchmark": "cpu_peers",
        "model": setup.name,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "dtype": args.dtype,
        "prefill_seconds": prefill_seconds,
        **{f"step_ms: {name}": value for name, value in medians.items()},
        **{f"slower than foretoken: {name}": value / medians["foretoken"] for name, value in medians.items()},
        "same_tokens_row_0": len({tuple(row) for name, row in tokens.items() if name not in own_models}) == 1,
        "transformers_version": transformers_version,
        **provenance(),
    }
    record = report.rounded(record)
    publish(args.output, record)


if __name__ == "__main__":
    exit_on_user_error(main)
