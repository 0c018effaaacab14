"""Plain decoding against Hugging Face transformers on a CPU: same weights, same KV, interleaved turns.

    python reproduce/cpu_peers.py --output reproduce/results/cpu_peers.jsonl

The prompt is prefilled once, by Foretoken; its keys and values are copied into transformers' caches. A peer's figure is
the median time between two of its tokens. Needs requirements-dev.txt.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from statistics import median
from typing import Any, ClassVar

import torch

import bench
import engine
from bench.config import BatchSize, Output, RunConfig, Sizes, Target
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from reproduce.paper.in_turns import in_turns

# Milliseconds between tokens, and the tokens of the first row.
Turns = Iterator[tuple[list[float], list[int]]]


@dataclass(frozen=True)
class Flags(Output):
    FLAGS: ClassVar[dict[str, str]] = {"gen_len": "--turns x --tokens_per_turn"}

    B: BatchSize = 8  # rows decoded together
    prefix_len: int = 7500  # prompt tokens per row
    turns: int = 4  # interleaved turns of every peer
    tokens_per_turn: int = 6  # new tokens of a row


class StepTimes(list[float]):
    """A stopping criterion of transformers that never stops, and notes when each token was there."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transformers_turns(model: Any, cache: Any, prompts: list[list[int]], n_tokens: int) -> Turns:
    """Turns of `generate` over `cache`, which holds the KV of every token but the last."""
    tokens, how = torch.tensor(prompts), {"max_new_tokens": n_tokens, "do_sample": False, "eos_token_id": None}
    while True:
        how |= {"attention_mask": torch.ones_like(tokens), "stopping_criteria": [times := StepTimes()]}
        longer = model.generate(tokens, past_key_values=cache, **how)
        yield [1e3 * (after - before) for before, after in pairwise(times)], longer[0, tokens.shape[1] :].tolist()
        tokens = longer


def foretoken_turns(runner: engine.ModelRunner, prompts: list[list[int]], n_tokens: int) -> Turns:
    """Ours: the same tokens from the rows' own KV, and like the peers with more context every turn."""
    for done in count(0, n_tokens):
        out = engine.generate(runner, prompts, max_new_tokens=done + n_tokens)
        yield [1e3 * round_.seconds for round_ in out.stats.rounds][done:], out.tokens[0][done:]


def main(flags: Flags) -> None:
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
    from transformers import __version__ as transformers_version

    require_at_least("turns", flags.turns, 1)
    require_at_least("tokens_per_turn", flags.tokens_per_turn, 2)  # what is measured is the time between two
    sizes = Sizes(flags.B, flags.prefix_len, flags.turns * flags.tokens_per_turn)
    target = Target(device="cpu", dtype="float32")
    session = bench.Session.open(RunConfig(target=target, sizes=sizes, output=Output(flags.output)))
    prefill_seconds = bench.prefill(session)
    gguf = next(DEFAULT_CHECKPOINT.glob("*.gguf"))
    how = {"gguf_file": gguf.name, "dtype": session.plan.dtype, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **how)
    with torch.inference_mode():
        static = StaticCache(config=model.config, max_cache_len=flags.prefix_len + session.plan.gen_len + 1)
        caches = {"static cache, sdpa": static, "default cache": DynamicCache(config=model.config)}
        given = session.prompts, flags.tokens_per_turn
        peers = {"foretoken": foretoken_turns(session.runner, *given)}
        for name, cache in caches.items():
            for layer, each in enumerate(zip(session.runner.cache.keys, session.runner.cache.values, strict=True)):
                cache.update(*(x[:, :, : flags.prefix_len - 1].contiguous() for x in each), layer)
            peers[f"transformers, {name}"] = transformers_turns(model, cache, *given)
        seen = in_turns({name: partial(next, turns) for name, turns in peers.items()}, flags.turns)
    medians = {name: median(ms for times, _ in turns for ms in times) for name, turns in seen.items()}
    texts = [[tokens for _, tokens in seen[name]] for name in peers]
    measured = {"prefill_seconds": prefill_seconds, **{f"step_ms: {name}": ms for name, ms in medians.items()}}
    measured |= {f"slower than foretoken: {name}": ms / medians["foretoken"] for name, ms in medians.items()}
    measured["same_tokens_row_0"] = all(text == texts[0] for text in texts)
    measured["transformers_version"] = transformers_version
    publish(flags.output, bench.rounded(bench.record_of("cpu_peers", session, measured)))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
