"""The chunks that a query retrieves, against a selection on plain lists, round by round as texts grow."""

import math
from dataclasses import replace

import pytest
import torch
from test_verify_topk import GAMMA, LENGTHS, WINDOW, Rows
from tiny import TINY, full_cache, random_prompts, tiny_model

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation, generate
from kv_cache import EMPTY, Retrieval, RetrievalKVCache
from models.llama import select_layers

CHUNK, CHOSEN, N_FIRST = 3, 10, 2
LONGEST = 100
ROUNDS = ([3, 0, 1, 2], [0, 3, 3, 0], [2, 3, 3, 1], [3, 3, 3, 3], [0, 0, 0, 1], [1, 3, 2, 3])


def draft_cache(config=TINY, dtype=torch.float64, **options) -> RetrievalKVCache:
    options = {"n_sink": N_FIRST, "refresh": 1, "chunk": CHUNK} | options
    policy = Retrieval(CHOSEN + WINDOW, WINDOW, **options)
    return RetrievalKVCache(config, len(LENGTHS), LONGEST, policy, "cpu", dtype)


def attended_chunks(rows: Rows, row: int, layer: int) -> list[list[range]]:
    """Of each KV head: the chunks that begin before the window, sinks first, then as the last query attends to them."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill_row(0, text)
    queries = again.last_queries(0, text, 1)[layer][:, 0]
    keys, group = again.cache.keys[layer, 0], model.config.n_head // model.config.n_kv_head
    starts, ordered = range(0, len(text) - WINDOW, CHUNK), []
    for head, own_keys in enumerate(keys):
        means = [sum(own_keys[start + i] for i in range(CHUNK)) / CHUNK for start in starts]
        received = [0.0] * len(means)
        for query in queries[head * group : (head + 1) * group]:
            weights = [math.exp(float(query @ mean) / math.sqrt(len(query))) for mean in means]
            received = [sum_ + weight / sum(weights) for sum_, weight in zip(received, weights, strict=True)]
        order = sorted(range(len(means)), key=lambda i: -math.inf if i * CHUNK < N_FIRST else -received[i])
        ordered.append([range(starts[i], min(starts[i] + CHUNK, len(text) - WINDOW)) for i in order])
    return ordered


def require_retrieved(rows: Rows, row: int) -> None:
    """Whole chunks are held, best first, as far as they fit; of the last one a part; and nothing that is recent."""
    text, source = rows.texts[row], rows.runner.cache
    recent = [p for p in rows.cache.positions[row, CHOSEN:].tolist() if p != EMPTY]
    assert max(recent) == len(text) - 1
    for layer in range(rows.model.config.n_layer):
        for head, chunks in enumerate(attended_chunks(rows, row, layer)):
            own = rows.cache.entries[layer, :, row, head, :CHOSEN]
            keys, values = source.entries[layer, :, row, head, : len(text)]
            now = [int((keys == key).all(-1).nonzero()) for key in own[0]]
            assert torch.equal(own[1], values[now]) and len({*now, *recent}) == len(now) + len(recent)
            left = CHOSEN
            for chunk in chunks:
                held = len({*now} & {*chunk})
                assert held == min(left, len(chunk))
                left -= held


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, n_kv_head=1), replace(TINY, n_head=6)], ids=["group 2", "group 4", "group 3"]
)
def test_rounds_retrieve_what_lists_do(config):
    """Ragged rows, of which one grows out of the capacity, and one takes another prompt on the way."""
    rows = Rows(draft_cache(config), tiny_model(config))
    for row in (0, 2, 3):
        require_retrieved(rows, row)
    for number, n_accepted in enumerate(ROUNDS):
        rows.round(n_accepted)
        if number == 2:
            rows.texts[2] = random_prompts([44], seed=7)[0]
            rows.fill(2)
        for row in range(4):
            if len(rows.texts[row]) > rows.cache.capacity:
                require_retrieved(rows, row)
    assert len(rows.texts[1]) > rows.cache.capacity


def test_means_are_those_of_all_chunks_that_texts_fill():
    """Kept up while nothing is chosen as well, and over several rounds without a choice."""
    rows = Rows(draft_cache(refresh=3))
    for number, n_accepted in enumerate(ROUNDS):
        rows.choosing = number % 3 == 2
        rows.round(n_accepted)
    for row, text in enumerate(rows.texts):
        n_chunk = len(text) // CHUNK
        keys = rows.runner.cache.keys[:, row, :, : n_chunk * CHUNK]
        whole = keys.unflatten(2, (n_chunk, CHUNK)).mean(3)
        torch.testing.assert_close(rows.cache.means[:, row, :, :n_chunk], whole, rtol=0, atol=1e-6)


def test_rows_by_name_retrieve_as_all_do_and_others_stay():
    together, apart = Rows(draft_cache()), Rows(draft_cache())
    for one in (together, apart):
        one.round([0, 0, 0, 0])
    together.round([2, 1, 0, 2], gamma=2)
    before = [x.clone() for x in (apart.cache.entries[:, :, 1:3], apart.cache.means[:, 1:3])]
    apart.round([2, 2], rows=[3, 0], gamma=2)
    for row in (0, 3):
        torch.testing.assert_close(apart.cache.entries[:, :, row], together.cache.entries[:, :, row])
        torch.testing.assert_close(apart.cache.means[:, row], together.cache.means[:, row])
    assert torch.equal(apart.cache.entries[:, :, 1:3], before[0])
    assert torch.equal(apart.cache.means[:, 1:3], before[1])


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_entries_of_8_bits_are_retrieved_by_what_they_stand_for(stored):
    model = tiny_model(dtype=torch.float32)
    narrow, wide = (Rows(draft_cache(dtype=dtype), model, stored) for dtype in (stored, torch.float32))
    for rows in (narrow, wide):
        rows.round([1, 1, 1, 1])
    values = narrow.cache.entries.float() * narrow.cache.scales[..., None]
    assert torch.equal(values[:, :, [0, 2, 3], :, :CHOSEN], wide.cache.entries[:, :, [0, 2, 3], :, :CHOSEN])
    assert narrow.cache.means.dtype == torch.float32 and torch.equal(narrow.cache.means, wide.cache.means)


def test_a_draft_of_some_layers_retrieves_by_those():
    config = replace(TINY, n_layer=4)
    model = tiny_model(config)
    shallow = select_layers(model, [1, 3])
    every, some = Rows(draft_cache(config), model), Rows(draft_cache(shallow.config), model, draft=(shallow, [1, 3]))
    for rows in (every, some):
        rows.round([2, 2, 2, 2])
    assert torch.equal(some.cache.entries, every.cache.entries[[1, 3]])
    assert torch.equal(some.cache.means, every.cache.means[[1, 3]])


def test_what_cannot_work_is_refused():
    for options, message in (
        ({"refresh": 0}, "refresh"),
        ({"n_sink": CHOSEN}, "no room for chosen entries"),
        ({"chunk": 0}, "a chunk has no place"),
        ({"chunk": WINDOW + 1}, "a chunk has no place"),
    ):
        with pytest.raises(ConfigError, match=message):
            draft_cache(**options)
    model = tiny_model()
    runner = ModelRunner(model, full_cache(model, len(LENGTHS)))
    drafter = SelfSpeculation(runner, draft_cache(), GAMMA)
    with pytest.raises(ConfigError, match="exceeds the draft's KV cache"):
        generate(runner, [[1] * (LONGEST - 5)], max_new_tokens=3, drafter=drafter)
