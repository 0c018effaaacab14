"""Retrieval: the chunks that a query retrieves equal a selection on plain lists, round by round as texts grow."""

import math
from dataclasses import replace

import pytest
import torch
from chosen_rows import CHOSEN, CHUNK, N_FIRST, WINDOW, Rows, retrieval_cache
from tiny import TINY, full_cache, random_prompts, tiny_model, weights_by_lists

from engine import ModelRunner
from kv_cache.base import EMPTY

ROUNDS = ([3, 0, 1, 2], [0, 3, 3, 0], [2, 3, 3, 1], [3, 3, 3, 3], [0, 0, 0, 1], [1, 3, 2, 3])


def attended_chunks(rows: Rows, row: int, layer: int) -> list[list[range]]:
    """Return for each KV head the chunks before the window: sinks, then by the last query's attention."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill_row(0, text)
    queries = again.last_queries(0, text, 1)[layer][:, 0]
    keys, group = again.cache.keys[layer, 0], model.config.n_head // model.config.n_kv_head
    starts, ordered = range(0, len(text) - WINDOW, CHUNK), []
    for head, head_keys in enumerate(keys):
        means = [sum(head_keys[start + i] for i in range(CHUNK)) / CHUNK for start in starts]
        heads = (weights_by_lists(query, means) for query in queries[head * group : (head + 1) * group])
        received = [sum(weights) for weights in zip(*heads, strict=True)]
        order = sorted(range(len(means)), key=lambda i: -math.inf if i * CHUNK < N_FIRST else -received[i])
        ordered.append([range(starts[i], min(starts[i] + CHUNK, len(text) - WINDOW)) for i in order])
    return ordered


def require_retrieved(rows: Rows, row: int) -> None:
    """Require whole chunks, best first, as far as they fit, a part of the last, and none of the recent entries."""
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
    """A ragged row outgrows the capacity, and another gets a new prompt."""
    rows = Rows(retrieval_cache(config), tiny_model(config))
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


def test_every_full_chunk_has_the_mean_of_its_keys():
    """Means are kept up in rounds without a choice, too."""
    rows = Rows(retrieval_cache(refresh=3))
    for number, n_accepted in enumerate(ROUNDS):
        rows.choosing = number % 3 == 2
        rows.round(n_accepted)
    for row, text in enumerate(rows.texts):
        n_chunk = len(text) // CHUNK
        keys = rows.runner.cache.keys[:, row, :, : n_chunk * CHUNK]
        whole = keys.unflatten(2, (n_chunk, CHUNK)).mean(3)
        torch.testing.assert_close(rows.cache.means[:, row, :, :n_chunk], whole, rtol=0, atol=1e-6)
