"""Positions inside the cache: the streaming cache against a StreamingLLM that keeps plain lists of tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from streaming_llm import StreamingLLM
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch import Tensor

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from kv_cache import EMPTY, StreamingKVCache
from models import Transformer
from models.attention.torch_backend import TorchAttention, visibility
from models.config import RopeScaling

TOLERANCE = 1e-10
MODELS = {
    "group 2": TINY,
    "group 1": replace(TINY, n_kv_head=4),
    "group 3": replace(TINY, n_head=6, n_kv_head=2),
    "qkv bias": replace(TINY, qkv_bias=True, tie_embeddings=True),
    "linear": replace(TINY, n_head=3, n_kv_head=1, rope_scaling=RopeScaling("linear", 4.0)),
    # A short original context, so that its ramp lies among the frequencies of a head of 8.
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
        self.runner.rollback(torch.tensor(lengths))
        for row, length in enumerate(lengths):
            self.rows[row].forget(length)
            self._compare_held(row)

    def _compare_held(self, row: int) -> None:
        assert sorted(p for p in self.cache.positions[row].tolist() if p != EMPTY) == self.rows[row].positions

    def _compare(self, logits: Tensor, expected: Tensor, row: int) -> None:
        self._compare_held(row)
        self.worst = max(self.worst, float((logits - expected).abs().max()))
        assert self.worst < TOLERANCE


def follow(both: Both, rng: random.Random, n_rounds: int, gamma: int) -> None:
    """Rounds as a standalone draft has them: a catch-up of two tokens, single steps, then a rollback.

    Rows keep different numbers of drafts. The first token of the next catch-up is the last that was kept.
    """
    vocab, n_rows = both.model.config.vocab_size, len(both.rows)
    texts = [[rng.randrange(vocab)] for _ in range(n_rows)]
    both.step(texts)
    for _ in range(n_rounds):
        starts = both.lengths
        current = [rng.randrange(vocab) for _ in range(n_rows)]
        drafted = [current, *([rng.randrange(vocab) for _ in range(n_rows)] for _ in range(gamma - 1))]
        both.step([[texts[i][-1], current[i]] for i in range(n_rows)], rewritten=1)
        for column in drafted[1:]:
            both.step([[token] for token in column])
        kept = [rng.randint(1, gamma) for _ in range(n_rows)]
        both.rollback([start + n for start, n in zip(starts, kept, strict=True)])
        texts = [[column[i] for column in drafted[: kept[i]]] for i in range(n_rows)]


@pytest.mark.parametrize("n_sink", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_streamingllm(name, n_sink, record_property):
    """Prompts within the sinks, within the budget and far beyond it; prefill, steps, catch-ups, rollbacks."""
    rng = random.Random(f"{name} {n_sink}")
    model, budget, gamma = tiny_model(MODELS[name]), n_sink + 9, 4
    prompts = random_prompts([2, 7, 61], seed=n_sink)
    both = Both(model, len(prompts), budget, n_sink, prefill_chunk=rng.choice([1, 3]))
    for row, prompt in enumerate(prompts):
        both.prefill(row, prompt)
    follow(both, rng, n_rounds=6, gamma=gamma)
    assert both.lengths[0] < both.lengths[2] and len(both.rows[2].positions) <= budget
    record_property("max: logits in places inside the cache, against StreamingLLM on lists", both.worst)


@pytest.mark.parametrize("n_sink", [0, 4])
@pytest.mark.parametrize("prefill_chunk", [1, 2, 5, 512])
def test_a_prompt_runs_in_chunks_of_any_size(prefill_chunk, n_sink):
    """Chunks evict before they attend, so their size matters: the reference's is the same."""
    both = Both(tiny_model(), 5, n_sink + 16, n_sink, prefill_chunk)
    assert both.runner.prefill_chunk == min(prefill_chunk, 8)
    for row, prompt in enumerate(random_prompts([1, 3, 4, 17, 75])):
        both.prefill(row, prompt)
    both.step([[3], [1], [4], [1], [5]])
    both.prefill(3, random_prompts([40], seed=9)[0])  # a row is filled anew beside rows that go on
    both.step([[2, 6], [5, 3], [5, 8], [9, 7], [9, 3]], rewritten=1)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_and_rollbacks_of_any_size(seed):
    """Blocks up to the whole window, rewriting anything that is still held; rollbacks to any such length."""
    rng = random.Random(seed)
    n_sink = rng.choice([0, 1, 4])
    window = rng.randint(3, 9)
    model = tiny_model(replace(MODELS["group 3"], n_layer=1), seed)
    both = Both(model, 3, n_sink + window, n_sink, rng.choice([1, 4, 512]))
    for row, prompt in enumerate(random_prompts([rng.randint(1, 40) for _ in range(3)], seed=seed)):
        both.prefill(row, prompt)

    def held_behind() -> int:
        """How many of its last tokens every row can lose and keep one more, the sinks aside."""
        return min(max(0, len([p for p in row.positions if p >= row.n_sink]) - 1) for row in both.rows)

    for _ in range(12):
        rewritten = rng.randint(0, min(held_behind(), window - 1))
        n_token = rng.randint(rewritten + 1, window)
        both.step([[rng.randrange(61) for _ in range(n_token)] for _ in range(3)], rewritten)
        losable = held_behind()
        both.rollback([length - rng.randint(0, losable) for length in both.lengths])


class Overheard(StandaloneDraft):
    """Keeps every round: the lengths and current tokens that it started from, and what it proposed."""

    rounds: list[tuple[list[int], list[int], list[list[int]]]]

    def propose(self, batch, verification, gamma):
        drafts = super().propose(batch, verification, gamma)
        self.rounds.append((batch.lengths.tolist(), batch.current.tolist(), drafts.tokens.tolist()))
        return drafts


@pytest.mark.parametrize("n_sink", [0, 4])
def test_drafts_are_those_of_streamingllm(n_sink):
    """The whole of a standalone draft, in rows that keep different numbers of its drafts; a fourth row idles."""
    target, budget, gamma, n_new = tiny_model(), n_sink + 10, 3, 24
    # A draft that is right now and then: the target's body under a slightly other head.
    model = tiny_model()
    model.output.weight += 0.3 * tiny_model(seed=5).output.weight
    prompts = random_prompts([1, 7, 61], seed=3)
    cache = StreamingKVCache(TINY, 4, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
    drafter = Overheard(ModelRunner(model, cache), gamma)
    drafter.rounds = []
    out = generate(ModelRunner(target, full_cache(target, 4)), prompts, max_new_tokens=n_new, drafter=drafter)
    for row, prompt in enumerate(prompts):
        reference, text = StreamingLLM(model, budget, n_sink), prompt + out.tokens[row]
        for start in range(0, len(prompt), 5):  # half the window
            reference.run(prompt[start : start + 5])
        n_rounds = out.stats.rows[row].rounds  # later ones only idle
        for lengths, current, drafts in drafter.rounds[:n_rounds]:
            length, token = lengths[row], current[row]
            assert token == text[length]
            reference.forget(length - 1)  # where all drafts were accepted, it ends there by itself
            assert reference.length == length - 1
            logits, expected = reference.run([text[length - 1], token])[-1], []
            for i in range(gamma):
                expected.append(int(logits.argmax()))
                if i < gamma - 1:
                    logits = reference.run(expected[-1:])[-1]
            assert drafts[row] == expected
    counts = [row.accepted for row in out.stats.rows]
    assert len(set(counts)) > 1 and 0 < out.stats.counts.acceptance_rate < 1


@pytest.mark.parametrize("n_sink", [0, 4])
def test_until_something_is_evicted_places_are_positions(n_sink):
    """Then rotating at the read, at the write, and a full cache are three ways to the same logits."""
    model, budget = tiny_model(), 48
    runners = [
        ModelRunner(model, cache, prefill_chunk=7)
        for cache in (
            StreamingKVCache(TINY, 2, budget, n_sink, dtype=torch.float64, rotate_on_read=True),
            StreamingKVCache(TINY, 2, budget, n_sink, dtype=torch.float64),
            full_cache(model, 2),
        )
    ]
    lengths = [29, 3]
    for row, prompt in enumerate(random_prompts(lengths)):
        hidden = [runner.fill_row(row, prompt)[0] for runner in runners]
        assert all(torch.allclose(h, hidden[0], rtol=0, atol=TOLERANCE) for h in hidden)
    generator = torch.Generator().manual_seed(1)

    def logits_of_a_block(n_token: int, start: Tensor) -> list[Tensor]:
        tokens = torch.randint(61, (2, n_token), generator=generator)
        positions = start[:, None] + torch.arange(n_token)
        logits = [
            runner.step(tokens, positions, runner.cache.view(extent=int(positions.max()) + 1)) for runner in runners
        ]
        in_cache = runners[0].cache
        places, slot_places = in_cache.rotary_positions(positions)
        if int(positions.max()) < budget:
            assert torch.equal(places, positions)
            used = in_cache.positions != EMPTY
            assert torch.equal(slot_places[used], in_cache.positions[used])
        return logits

    start = torch.tensor(lengths)
    for n_token in (1, 4, 2, 6, 6):  # 29 + 19 = the budget
        logits = logits_of_a_block(n_token, start)
        assert all(torch.allclose(each, logits[0], rtol=0, atol=TOLERANCE) for each in logits)
        start = start + n_token
    in_cache, absolute, full = logits_of_a_block(1, start)
    assert all(torch.allclose(each[1], full[1], rtol=0, atol=TOLERANCE) for each in (in_cache, absolute))
    if n_sink:  # the sinks are now closer than the text has them
        assert (in_cache[0] - absolute[0]).abs().max() > 1e-3
    else:  # the window moves as one, and a rotation knows only distances
        assert torch.allclose(in_cache[0], absolute[0], rtol=0, atol=TOLERANCE)
    assert (absolute[0] - full[0]).abs().max() > 1e-3


class CountingAttention(TorchAttention):
    """Keeps what each query of each forward was shown: its position, and those of the slots it saw."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, list[int]]] = []

    def prepare(self, spec, queries, slots):
        visible = visibility(queries, slots.positions, spec.sliding_window)
        for row, positions in enumerate(queries.tolist()):
            for i, position in enumerate(positions):
                self.shown.append((position, sorted(slots.positions[row, visible[row, i]].tolist())))
        return super().prepare(spec, queries, slots)


@pytest.mark.parametrize("rotate_on_read", [False, True])
@pytest.mark.parametrize("budget,n_sink", [(8, 4), (9, 0), (24, 4)])
def test_no_query_sees_more_than_the_budget(budget, n_sink, rotate_on_read):
    """Neither while decoding nor in a prefill: sinks, then one gapless window that ends at the query."""
    target = tiny_model(replace(TINY, max_context=512))
    draft = tiny_model(replace(TINY, max_context=512))
    draft.backend = counting = CountingAttention()
    cache = StreamingKVCache(TINY, 2, budget, n_sink, dtype=torch.float64, rotate_on_read=rotate_on_read)
    runner = ModelRunner(target, full_cache(target, 2, 400))
    drafter = StandaloneDraft(ModelRunner(draft, cache), gamma=3)
    generate(runner, random_prompts([1, 150, 33]), max_new_tokens=12, drafter=drafter)
    sizes = set()
    for position, seen in counting.shown:
        assert len(seen) <= budget
        sinks, recent = [p for p in seen if p < n_sink], [p for p in seen if p >= n_sink]
        assert sinks == list(range(min(n_sink, position + 1)))
        assert recent == list(range(position + 1 - len(recent), position + 1))
        # A prefill chunk of half the window leaves its first token the other half.
        assert len(recent) > min(position - n_sink, (budget - n_sink) // 2 - 4)
        sizes.add(len(seen))
    assert max(sizes) == budget and max(position for position, _ in counting.shown) > 150


def test_self_speculation_refuses_positions_inside_the_cache():
    """Its cache is filled with the target's keys, which are turned to absolute positions already."""
    model = tiny_model()
    runner = ModelRunner(model, full_cache(model, 2))
    for budget, n_sink in ((16, 4), (64, 0)):
        cache = StreamingKVCache(TINY, 2, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
        with pytest.raises(ConfigError, match="rotated already"):
            SelfSpeculation(runner, cache, gamma=3)
    SelfSpeculation(runner, StreamingKVCache(TINY, 2, 16, 4, dtype=torch.float64), gamma=3)
