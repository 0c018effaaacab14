"""KV caches: positions inside the streaming cache against a StreamingLLM on lists, views of rows, entries in 8 bits."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.base import EMPTY
from kv_cache.entries import pack
from models import Transformer
from models.config import RopeScaling
from tests.support.tiny import TINY, full_cache, random_prompts, tiny_model, tiny_runner

TOLERANCE = 1e-10
# Models with the number of sinks of their cache.
MODELS = {
    "group 2": (TINY, 0),
    "group 3, qkv bias": (replace(TINY, n_head=6, n_kv_head=2, qkv_bias=True, tie_embeddings=True), 1),
    "qk norm, a layer without rope": (replace(TINY, qk_norm=True, unrotated_layers=(1,)), 4),
    # A short original context, so that the ramps lie among the frequencies of a head of 8.
    "yarn": (replace(TINY, rope_scaling=RopeScaling("yarn", 4.0, original_context=64, attention_factor=1.25)), 1),
    "one KV head, llama3": (replace(TINY, n_kv_head=1, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)), 4),
}


class StreamingLLM:
    """A row of StreamingLLM (arXiv 2309.17453, section 3.2): the tokens that it retains, each at its place in the list.

    Before a block runs, the oldest tokens that are no sinks leave until the block fits into the budget. Only one layer
    of the model attends, so that entries depend on their tokens alone: the model over the retained tokens, without a
    cache, is the reference.
    """

    def __init__(self, model: Transformer, budget: int, n_sink: int) -> None:
        self.model, self.budget, self.n_sink = model, budget, n_sink
        self.retained: list[tuple[int, int]] = []  # positions and tokens

    @property
    def positions(self) -> list[int]:
        return [position for position, _ in self.retained]

    @property
    def length(self) -> int:
        return self.retained[-1][0] + 1 if self.retained else 0

    def forget(self, length: int) -> None:
        """Drop the positions from `length` on; entries that a longer text evicted do not come back."""
        self.retained = [(position, token) for position, token in self.retained if position < length]

    def run(self, tokens: list[int]) -> Tensor:
        """Return the logits `[T, V]` of a block of tokens after the text."""
        n_evicted = max(0, len(self.retained) + len(tokens) - self.budget)
        start = self.length
        del self.retained[self.n_sink : self.n_sink + n_evicted]
        self.retained += enumerate(tokens, start)
        every, n = torch.tensor([[token for _, token in self.retained]]), len(self.retained)
        return self.model(every, torch.arange(n)[None], full_cache(self.model, 1, n))[0, -len(tokens) :]


class Both:
    """A batch in the streaming cache, with each row in the reference as well; every logit is compared."""

    def __init__(self, model: Transformer, n_rows: int, budget: int, n_sink: int, prefill_chunk: int) -> None:
        cache = StreamingKVCache(model.config, n_rows, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
        self.runner = ModelRunner(model, cache, prefill_chunk)
        self.rows = [StreamingLLM(model, budget, n_sink) for _ in range(n_rows)]
        self.worst = 0.0

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def prefill(self, row: int, prompt: list[int]) -> None:
        self.runner.cache.reset_row(row)
        prefilled = self.runner.prefill(row, prompt)
        self.rows[row].forget(0)
        for start in range(0, len(prompt), self.runner.prefill_chunk):
            logits = self.rows[row].run(prompt[start : start + self.runner.prefill_chunk])
        assert prefilled.bad_position is None
        self._compare(row, prefilled.logits, logits[-1])

    def step(self, blocks: list[list[int]], n_rewritten: int) -> None:
        """Run a block a row, over its last `n_rewritten` tokens; the reference forgets those first."""
        starts = [length - n_rewritten for length in self.lengths]
        positions = torch.tensor(starts)[:, None] + torch.arange(len(blocks[0]))
        # The engine, too, uses a common extent for all rows, which may lie beyond the longest.
        view = self.runner.cache.view(extent=int(positions.max()) + 4)
        logits = self.runner.step(torch.tensor(blocks), positions, view)
        for i, row in enumerate(self.rows):
            row.forget(starts[i])
            self._compare(i, logits[i], row.run(blocks[i]))

    def rollback(self, lengths: list[int]) -> None:
        self.runner.cache.rollback(torch.tensor(lengths))
        for row, length in enumerate(lengths):
            self.rows[row].forget(length)
            self._compare(row)

    def _compare(self, row: int, logits: Tensor | None = None, expected: Tensor | None = None) -> None:
        positions = self.runner.cache.positions[row].tolist()
        assert sorted(p for p in positions if p != EMPTY) == self.rows[row].positions
        if logits is not None:
            self.worst = max(self.worst, float((logits - expected).abs().max()))
            assert self.worst < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_streamingllm(name, record_property):
    """Prompts within the sinks, within the budget and far beyond it, in chunks, which evict before they attend.

    Blocks of up to a whole window follow, which rewrite retained tokens, as a catch-up does; rollbacks to any such
    length; and rows that are filled anew while other rows go on.
    """
    rng, (config, n_sink) = random.Random(name), MODELS[name]
    model, window = tiny_model(config), rng.randint(3, 16)
    silent = rng.randrange(2)
    model.layers[silent].attention.wo.weight.zero_()
    both = Both(model, 4, n_sink + window, n_sink, rng.choice([1, 2, 5, 512]))
    for row, prompt in enumerate(random_prompts([1, 4, 17, rng.randint(60, 75)], seed=n_sink)):
        both.prefill(row, prompt)

    def n_losable() -> int:
        """Return how many of its last tokens every row can lose and keep one more, sinks aside."""
        return min(max(0, len([p for p in row.positions if p >= row.n_sink]) - 1) for row in both.rows)

    for step in range(16):
        n_rewritten = rng.randint(0, min(n_losable(), window - 1))
        n_token = rng.randint(n_rewritten + 1, window)
        both.step([[rng.randrange(model.config.vocab_size) for _ in range(n_token)] for _ in both.rows], n_rewritten)
        n = n_losable()
        both.rollback([length - rng.randint(0, n) for length in both.lengths])
        if step % 5 == 4:
            both.prefill(rng.randrange(4), random_prompts([rng.randint(1, 40)], seed=step)[0])
    record_property("max: logits in places inside the cache, against StreamingLLM on lists", both.worst)


def test_self_speculation_refuses_positions_inside_the_cache():
    """The target's keys, which fill the cache, are rotated to absolute positions already."""
    cache = StreamingKVCache(TINY, 2, 16, 4, dtype=torch.float64, rotate_on_read=True)
    with pytest.raises(ConfigError, match="rotated already"):
        SelfSpeculation(tiny_runner(2), cache, gamma=3)


@pytest.mark.parametrize("dtype,error", [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 0.04)])
def test_entries_in_8_bits_are_close_and_copied_with_their_scales(dtype, error):
    """Each token and head has its scale, so that magnitudes may differ; a zero stays zero."""
    target, draft = FullKVCache(TINY, 2, 20, dtype=dtype), StreamingKVCache(TINY, 2, 6, 2, dtype=dtype)
    positions = torch.arange(9).expand(2, 9)
    keys = torch.randn(2, 9, 2, 8) * torch.logspace(-3, 3, 9)[:, None, None]
    keys[0, 4] = 0
    for layer in range(TINY.n_layer):
        target.write(layer, target.begin(positions), pack(keys, -keys))
    stored_keys, stored_values = target.read(1).dequantized(torch.float32)
    largest = keys.abs().amax(-1, keepdim=True)
    assert ((stored_keys[:, :9] - keys).abs() <= 1.01 * error * largest).all()
    assert torch.equal(stored_values, -stored_keys)
    draft.fill_row(1, target, 9)
    kept = draft.retained_positions(9)
    copied = draft.read(1).dequantized(torch.float32)[0][1, draft.slots(kept)]
    assert torch.equal(copied, stored_keys[1, kept])
    plain = StreamingKVCache(TINY, 2, 6, 2)
    plain.fill_row(1, target, 9)
    assert torch.equal(plain.read(1).keys[1, plain.slots(kept)], stored_keys[1, kept])
    assert target.n_bytes == 2 * 2 * 2 * 20 * 2 * (8 + 4)
