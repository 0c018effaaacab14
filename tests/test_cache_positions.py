"""Positions inside the cache: the streaming cache against a StreamingLLM that keeps plain lists of tokens."""

import random
from dataclasses import replace

import pytest
import torch
from streaming_llm import StreamingLLM
from tiny import TINY, random_prompts, tiny_model, tiny_runner
from torch import Tensor

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation
from kv_cache import StreamingKVCache
from kv_cache.base import EMPTY
from models import Transformer
from models.config import RopeScaling

TOLERANCE = 1e-10
MODELS = {
    "group 2": TINY,
    "group 1": replace(TINY, n_kv_head=4),
    "group 3": replace(TINY, n_head=6, n_kv_head=2),
    "qkv bias": replace(TINY, qkv_bias=True, tie_embeddings=True),
    "linear": replace(TINY, n_head=3, n_kv_head=1, rope_scaling=RopeScaling("linear", 4.0)),
    # A short original context, so that its ramp lies among the frequencies of a head of 8.
    "qk norm, layers without rope": replace(TINY, qk_norm=True, unrotated_layers=(1,)),
    "yarn": replace(TINY, rope_scaling=RopeScaling("yarn", 4.0, original_context=64, attention_factor=1.25)),
    "llama3": replace(TINY, n_kv_head=1, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
}


class Both:
    """A batch in the streaming cache, and each of its rows in the reference; every logit is compared."""

    def __init__(self, model: Transformer, n_rows: int, budget: int, n_sink: int, prefill_chunk: int = 512) -> None:
        cache = StreamingKVCache(model.config, n_rows, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
        self.model, self.cache = model, cache
        self.runner = ModelRunner(model, cache, prefill_chunk)
        self.rows = [StreamingLLM(model, budget, n_sink) for _ in range(n_rows)]
        self.worst, self.spare = 0.0, 3

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def prefill(self, row: int, prompt: list[int]) -> None:
        hidden, finite = self.runner.fill_row(row, prompt)
        self.rows[row].forget(0)
        for start in range(0, len(prompt), self.runner.prefill_chunk):
            logits = self.rows[row].run(prompt[start : start + self.runner.prefill_chunk])
        assert finite.all()
        self._compare(self.model.logits(hidden), logits[-1], row)

    def step(self, blocks: list[list[int]], rewritten: int = 0) -> None:
        """Run a block a row, over its last `rewritten` tokens; the reference forgets those first."""
        starts = [length - rewritten for length in self.lengths]
        tokens = torch.tensor(blocks)
        positions = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
        # As in the engine, one extent for all rows, which may lie beyond the longest.
        logits = self.runner.step(tokens, positions, self.cache.view(extent=int(positions.max()) + 1 + self.spare))
        for i, row in enumerate(self.rows):
            row.forget(starts[i])
            self._compare(logits[i], row.run(blocks[i]), i)

    def rollback(self, lengths: list[int]) -> None:
        self.runner.cache.rollback(torch.tensor(lengths))
        for row, length in enumerate(lengths):
            self.rows[row].forget(length)
            self._compare_held(row)

    def _compare_held(self, row: int) -> None:
        assert sorted(p for p in self.cache.positions[row].tolist() if p != EMPTY) == self.rows[row].positions

    def _compare(self, logits: Tensor, expected: Tensor, row: int) -> None:
        self._compare_held(row)
        self.worst = max(self.worst, float((logits - expected).abs().max()))
        assert self.worst < TOLERANCE


@pytest.mark.parametrize("n_sink", [0, 1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_streamingllm(name, n_sink, record_property):
    """Prompts within the sinks, within the budget and far beyond it, in chunks, which evict before they attend.

    Then blocks up to the whole window, which rewrite anything that is still held, as a catch-up does; rollbacks to any
    such length; and rows that are filled anew beside rows that go on.
    """
    rng = random.Random(f"{name} {n_sink}")
    model, window = tiny_model(MODELS[name]), rng.randint(3, 16)
    both = Both(model, 4, n_sink + window, n_sink, rng.choice([1, 2, 5, 512]))
    for row, prompt in enumerate(random_prompts([1, 4, 17, rng.randint(60, 75)], seed=n_sink)):
        both.prefill(row, prompt)

    def held_behind() -> int:
        """Return how many of its last tokens every row can lose and keep one more, sinks aside."""
        return min(max(0, len([p for p in row.positions if p >= row.n_sink]) - 1) for row in both.rows)

    for step in range(16):
        rewritten = rng.randint(0, min(held_behind(), window - 1))
        n_token = rng.randint(rewritten + 1, window)
        both.step([[rng.randrange(model.config.vocab_size) for _ in range(n_token)] for _ in both.rows], rewritten)
        losable = held_behind()
        both.rollback([length - rng.randint(0, losable) for length in both.lengths])
        if step % 5 == 4:
            both.prefill(rng.randrange(4), random_prompts([rng.randint(1, 40)], seed=step)[0])
    record_property("max: logits in places inside the cache, against StreamingLLM on lists", both.worst)


def test_self_speculation_refuses_positions_inside_the_cache():
    """The target's keys, which fill the cache, are rotated to absolute positions already."""
    runner = tiny_runner(2)
    for budget, n_sink in ((16, 4), (64, 0)):
        cache = StreamingKVCache(TINY, 2, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
        with pytest.raises(ConfigError):
            SelfSpeculation(runner, cache, gamma=3)
    SelfSpeculation(runner, StreamingKVCache(TINY, 2, 16, 4, dtype=torch.float64), gamma=3)
