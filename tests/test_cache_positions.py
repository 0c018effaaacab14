"""Positions inside the cache: the streaming cache against a StreamingLLM that keeps plain lists of tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch import Tensor

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from kv_cache import EMPTY, KVCache, StreamingKVCache
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


class StreamingLLM:
    """One row of StreamingLLM (arXiv 2309.17453, section 3.2): lists of un-rotated keys, places by list order.

    Before a block runs, the oldest entries that are no sinks leave until the block fits into the budget.
    """

    def __init__(self, model: Transformer, budget: int, n_sink: int) -> None:
        self.model, self.budget, self.n_sink = model, budget, n_sink
        self.positions: list[int] = []
        self.entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]

    @property
    def length(self) -> int:
        return self.positions[-1] + 1 if self.positions else 0

    def forget(self, length: int) -> None:
        """Drop the positions from `length` on; what a longer text evicted does not come back."""
        kept = sum(position < length for position in self.positions)
        del self.positions[kept:]
        for entries in self.entries:
            del entries[kept:]

    def run(self, tokens: list[int]) -> Tensor:
        """Logits `[T, V]` of the block of tokens that follows what is held."""
        start = self.length
        n_evicted = max(0, len(self.positions) + len(tokens) - self.budget)
        for held in (self.positions, *self.entries):
            del held[self.n_sink : self.n_sink + n_evicted]
        self.positions += range(start, start + len(tokens))
        assert len(self.positions) <= self.budget
        x = self.model.tok_embeddings.weight[torch.tensor(tokens)]
        for entries, block in zip(self.entries, self.model.layers, strict=True):
            x = x + self._attention(block.attention_norm(x), entries, block.attention)
            gate, up = (block.ffn_norm(x) @ block.feed_forward.w13.weight.T).chunk(2, dim=-1)
            x = x + (gate * gate.sigmoid() * up) @ block.feed_forward.w2.weight.T
        head = self.model.output or self.model.tok_embeddings
        return self.model.norm(x) @ head.weight.T

    def _attention(self, x: Tensor, entries: list[tuple[Tensor, Tensor]], weights) -> Tensor:
        config, n_token = self.model.config, len(x)
        stacked = x @ weights.wqkv.weight.T
        if weights.wqkv.bias is not None:
            stacked = stacked + weights.wqkv.bias
        n_q, n_kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        q, k, v = (part.view(n_token, -1, config.head_dim) for part in stacked.split([n_q, n_kv, n_kv], dim=-1))
        entries += zip(k, v, strict=True)
        frequencies = self.model._frequencies
        keys = [turned(key, place, frequencies) for place, (key, _) in enumerate(entries)]
        out = []
        for i in range(n_token):
            n_seen = len(entries) - n_token + i + 1
            query = turned(q[i], n_seen - 1, frequencies)
            for head in range(config.n_head):
                group = head // (config.n_head // config.n_kv_head)
                scores = torch.stack([query[head] @ key[group] for key in keys[:n_seen]]) * config.head_dim**-0.5
                out.append(scores.softmax(0) @ torch.stack([value[group] for _, value in entries[:n_seen]]))
        return torch.stack(out).view(n_token, -1) @ weights.wo.weight.T


def turned(x: Tensor, place: int, frequencies: Tensor) -> Tensor:
    """Heads `x [H, D]` turned to a place: pair i, (x[i], x[i + D/2]), as a complex number."""
    first, second = x.chunk(2, dim=-1)
    pairs = torch.complex(first, second) * torch.exp(1j * place * frequencies.double())
    return torch.cat([pairs.real, pairs.imag], dim=-1)


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


def test_what_the_reference_borrows_is_right():
    """It takes the model's float32 frequencies: these are the formulas' (RoFormer; linear; Llama 3.1)."""
    for config in MODELS.values():
        plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
        scaling, expected = config.rope_scaling, plain
        if scaling and scaling.kind == "linear":
            expected = [f / scaling.factor for f in plain]
        elif scaling:
            expected = [llama3(f, scaling) for f in plain]
            ramp = [p for p, f in zip(plain, expected, strict=True) if p / scaling.factor < f < p]
            assert ramp, "no frequency lies on the ramp"
        frequencies = tiny_model(config)._frequencies
        assert torch.allclose(frequencies.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def llama3(frequency: float, scaling: RopeScaling) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_context / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


class Placed(StreamingKVCache):
    """Records the places that every forward is given, of queries and of the slots in use."""

    seen: tuple[list[Tensor], list[Tensor]]

    def rotary_positions(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        queries, slots = super().rotary_positions(positions)
        assert slots is not None and queries.shape == positions.shape and slots.shape == self.positions.shape
        self.seen[0].append(queries.clone())
        self.seen[1].append(slots.masked_fill(self.positions == EMPTY, EMPTY))
        for row, held in enumerate(self.positions):
            used = held != EMPTY
            order = held[used].argsort()
            assert slots[row, used][order].tolist() == list(range(int(used.sum()))), "places have gaps or repeat"
        return queries, slots


def decode(model: Transformer, cache: KVCache, prompts: list[list[int]], n_tokens: int):
    """The target itself as a standalone draft over that cache, two rows at a time."""
    runner = ModelRunner(model, full_cache(model, cache.max_batch, 400))
    drafter = StandaloneDraft(ModelRunner(model, cache), gamma=3)
    return generate(runner, prompts, max_new_tokens=n_tokens, drafter=drafter)


@pytest.mark.parametrize("budget,n_sink", [(8, 4), (12, 0), (40, 4)])
def test_places_never_reach_the_budget(budget, n_sink):
    model = tiny_model(replace(TINY, max_context=512))
    cache = Placed(TINY, 2, budget, n_sink, dtype=torch.float64, rotate_on_read=True)
    cache.seen = [], []
    prompts = random_prompts([1, 300, 33, 5])
    out = decode(model, cache, prompts, 25)
    plain = generate(ModelRunner(model, full_cache(model, 2, 400)), prompts, max_new_tokens=25)
    assert out.tokens == plain.tokens
    for places in cache.seen:
        highest = max(int(each.max()) for each in places)
        assert highest == budget - 1, "a long text fills the cache and goes no further"
        assert min(int(each.min()) for each in places) >= EMPTY
    assert min(int(each.min()) for each in cache.seen[0]) >= 0
    assert len(cache.seen[0]) > 60


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
