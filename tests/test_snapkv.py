"""SnapKV: the selected entries equal a selection on plain lists, also of some layers and in 8 bits."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, self_draft, tiny_model, weights_by_lists

from engine import ModelRunner
from engine.drafters import RowUpdate
from kv_cache import FullKVCache
from kv_cache.snapkv import POOL, SnapKV

WINDOW, BUDGET = 6, 16
SELECTED = BUDGET - WINDOW
SHAPES = {
    "group 1": replace(TINY, n_kv_head=4),
    "group 2": TINY,
    "group 3": replace(TINY, n_head=6, n_kv_head=2),
    "group 4": replace(TINY, n_kv_head=1),
}


def received_by_lists(queries, keys):
    """Return the attention that entries receive from the last queries, averaged over the heads of a group."""
    n_query, n_token, group = queries.shape[1], keys.shape[1], len(queries) // len(keys)
    received = [[0.0] * n_token for _ in keys]
    for head, i in product(range(len(queries)), range(n_query)):
        visible = keys[head // group, : n_token - n_query + i + 1]
        for j, weight in enumerate(weights_by_lists(queries[head, i], visible)):
            received[head // group][j] += weight / group
    return received


def selected_by_lists(received, n_selected: int, window: int, pool: int) -> list[list[int]]:
    """Return the best entries before the window by the mean over their neighbours (zeros beyond the ends)."""
    chosen = []
    for head in received:
        votes = head[: len(head) - window]
        padded = [0.0] * (pool // 2) + votes + [0.0] * (pool // 2)
        pooled = [sum(padded[i : i + pool]) / pool for i in range(len(votes))]
        best = sorted(range(len(votes)), key=lambda i: -pooled[i])[:n_selected]
        chosen.append(sorted(best))
    return chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_holds_what_lists_select(shape):
    """In every layer and head of ragged rows, the cache holds the target's entries of selected tokens and window."""
    model = tiny_model(SHAPES[shape])
    prompts = random_prompts([40, 11, 29])
    runner = ModelRunner(model, full_cache(model, 3), prefill_chunk=7)
    drafter = self_draft(runner, SnapKV(BUDGET, WINDOW), gamma=2)
    cache = drafter.cache
    heads_differ = False
    for row, prompt in enumerate(prompts):
        runner.prefill_row(row, prompt)
        before = runner.cache.keys.clone()
        drafter.follow([RowUpdate(row, row, prompt, 0)])
        assert torch.equal(runner.cache.keys, before), "looking must not store anything"
        n_token = len(prompt)
        if n_token <= BUDGET:
            assert cache.positions[row, :n_token].tolist() == list(range(n_token))
            assert torch.equal(cache.keys[:, row, :, :n_token], runner.cache.keys[:, row, :, :n_token])
            continue
        queries = runner.last_queries(row, prompt, WINDOW)
        ring = cache.slots(torch.arange(n_token - WINDOW, n_token))
        for layer in range(model.config.n_layer):
            keys, values = runner.cache.keys[layer, row, :, :n_token], runner.cache.entries[layer, 1, row, :, :n_token]
            chosen = selected_by_lists(received_by_lists(queries[layer], keys), SELECTED, WINDOW, POOL)
            heads_differ |= len({tuple(head) for head in chosen}) > 1
            for head, positions in enumerate(chosen):
                kept_keys, kept_values = (x[layer, row, head] for x in (cache.keys, cache.entries[:, 1]))
                assert torch.equal(kept_keys[:SELECTED], keys[head, positions])
                assert torch.equal(kept_values[:SELECTED], values[head, positions])
                assert torch.equal(kept_keys[ring], keys[head, n_token - WINDOW :])
    assert heads_differ or shape == "group 4"


def test_selected_layers_and_8_bit_entries():
    """A draft of some layers selects by those layers' queries; 8-bit entries keep their scales."""
    model = tiny_model(replace(TINY, n_layer=4), dtype=torch.float32)
    prompt = random_prompts([40])[0]
    runner = ModelRunner(model, FullKVCache(model.config, 1, 80, dtype=torch.int8))
    runner.prefill_row(0, prompt)
    queries = runner.last_queries(0, prompt, WINDOW)
    shape = replace(TINY, n_layer=2)
    all_layers = SnapKV(BUDGET, WINDOW).new_cache(model.config, 1, 0, "cpu", torch.int8)
    some = SnapKV(BUDGET, WINDOW).new_cache(shape, 1, 0, "cpu", torch.int8)
    wide = SnapKV(BUDGET, WINDOW).new_cache(shape, 1, 0, "cpu", torch.float32)
    all_layers.fill_row(0, runner.cache, 40, queries=queries)
    for cache in (some, wide):
        cache.fill_row(0, runner.cache, 40, [3, 1], queries)
    for i, layer in enumerate([3, 1]):
        assert torch.equal(some.keys[i], all_layers.keys[layer])
        assert torch.equal(some.scales[i], all_layers.scales[layer])
        torch.testing.assert_close(wide.entries[i], some.entries[i] * some.scales[i][..., None])
