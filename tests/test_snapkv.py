"""SnapKV: what is selected, against a selection on plain lists; what the cache then holds, and how it goes on."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, self_draft, tiny_model, tiny_runner

from common.errors import ConfigError
from engine import ModelRunner, StandaloneDraft, generate
from engine.drafters import RowUpdate
from kv_cache import FullKVCache
from kv_cache.base import EMPTY
from kv_cache.snapkv import POOL, SnapKV, attention_received

WINDOW, BUDGET = 6, 16
SELECTED = BUDGET - WINDOW
SHAPES = {
    "group 1": replace(TINY, n_kv_head=4),
    "group 2": TINY,
    "group 3": replace(TINY, n_head=6, n_kv_head=2),
    "group 4": replace(TINY, n_kv_head=1),
}


def received_by_lists(queries, keys):
    """The same by loops: softmax of the scaled scores of every query over what it may see."""
    n_head, n_query, head_dim = queries.shape
    n_kv_head, n_token, _ = keys.shape
    group = n_head // n_kv_head
    received = [[0.0] * n_token for _ in range(n_kv_head)]
    for head in range(n_head):
        for i in range(n_query):
            last = n_token - n_query + i
            scores = [float(queries[head, i] @ keys[head // group, j]) / math.sqrt(head_dim) for j in range(last + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            for j, weight in enumerate(weights):
                received[head // group][j] += weight / sum(weights) / group
    return received


def selected_by_lists(received, n_selected: int, window: int, pool: int) -> list[list[int]]:
    """The prompt's best entries outside the window, by the mean over their neighbours (zeros beyond the ends)."""
    chosen = []
    for head in received:
        votes = head[: len(head) - window]
        padded = [0.0] * (pool // 2) + votes + [0.0] * (pool // 2)
        pooled = [sum(padded[i : i + pool]) / pool for i in range(len(votes))]
        best = sorted(range(len(votes)), key=lambda i: -pooled[i])[:n_selected]
        chosen.append(sorted(best))
    return chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_a_causal_softmax(shape):
    config = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(config.n_head, 5, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(config.n_kv_head, 23, 8, generator=generator, dtype=torch.float64)
    received = attention_received(queries, keys, torch.arange(23) > torch.arange(18, 23)[:, None])
    torch.testing.assert_close(received, torch.tensor(received_by_lists(queries, keys)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(received.sum(dim=1), torch.full((config.n_kv_head,), 5.0))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_holds_what_lists_select(shape):
    """Every layer and head of ragged rows: the target's own entries of the selected tokens, and the window's."""
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


def test_the_queries_are_those_of_the_prefill():
    """Run once more over the cache, in other chunks: what a forward over the whole prompt computes."""
    model, prompt = tiny_model(), random_prompts([33])[0]
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=5)
    runner.prefill_row(1, prompt)
    queries, backend = runner.last_queries(1, prompt, 9), type(model.backend)
    with patch.object(backend, "attend", autospec=True, side_effect=backend.attend) as attend:
        model(torch.tensor([prompt]), torch.arange(33)[None], full_cache(model, 1))
    for got, call in zip(queries, attend.call_args_list, strict=True):
        torch.testing.assert_close(got, call.args[1][0, -9:].transpose(0, 1), rtol=1e-10, atol=1e-10)


def test_the_window_moves_on_and_the_selection_stays():
    runner, prompt = tiny_runner(1), random_prompts([40])[0]
    drafter = self_draft(runner, SnapKV(BUDGET, WINDOW), gamma=2)
    cache = drafter.cache
    runner.prefill_row(0, prompt)
    drafter.follow([RowUpdate(0, 0, prompt, 0)])
    selection = cache.keys[:, 0, :, :SELECTED].clone()
    out = generate(runner, [prompt], max_new_tokens=30, drafter=drafter)
    assert torch.equal(cache.keys[:, 0, :, :SELECTED], selection)
    held = cache.positions[0].tolist()
    assert held[:SELECTED] == list(range(SELECTED))
    # The last token's KV is never computed, and what the last round drafted behind it is forgotten.
    length = len(prompt) + len(out.tokens[0]) - 1
    recent = sorted(position for position in held[SELECTED:] if position != EMPTY)
    assert recent and recent[-1] < length and recent[0] >= length - WINDOW - 2


def test_a_standalone_draft_selects_from_its_own_prompt():
    """The draft's row equals what the policy keeps of a whole cache that the same model filled."""
    draft, prompts = tiny_model(seed=4), random_prompts([37, 9, 28])
    cache = SnapKV(BUDGET, WINDOW).new_cache(TINY, 3, 0, "cpu", torch.float64)
    drafter = StandaloneDraft(ModelRunner(draft, cache), gamma=2)
    whole = ModelRunner(draft, full_cache(draft, 3))
    expected = SnapKV(BUDGET, WINDOW).new_cache(TINY, 3, 0, "cpu", torch.float64)
    for row, prompt in enumerate(prompts):
        drafter.follow([RowUpdate(row, row, prompt, 0)])
        whole.fill_row(row, prompt)
        queries = whole.last_queries(row, prompt, WINDOW) if len(prompt) > BUDGET else None
        expected.fill_row(row, whole.cache, len(prompt), queries=queries)
    assert torch.equal(cache.positions, expected.positions)
    torch.testing.assert_close(cache.keys, expected.keys, rtol=1e-10, atol=1e-10)


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
    for own, layer in enumerate([3, 1]):
        assert torch.equal(some.keys[own], all_layers.keys[layer])
        assert torch.equal(some.scales[own], all_layers.scales[layer])
        torch.testing.assert_close(wide.entries[own], some.entries[own] * some.scales[own][..., None])


def test_what_cannot_work_is_refused():
    for budget, window in ((WINDOW, WINDOW), (512, 0), (3, 5)):
        with pytest.raises(ConfigError):
            SnapKV(budget, window).check()
