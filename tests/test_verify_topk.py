"""verify_topk: the entries that verification's queries choose equal a selection on plain lists."""

import math
from dataclasses import replace

import pytest
import torch
from chosen_rows import CHOSEN, GAMMA, LENGTHS, WINDOW, Rows, topk_cache
from tiny import TINY, full_cache, random_prompts, tiny_model, tiny_runner, weights_by_lists

from engine import ModelRunner, SelfSpeculation, generate
from kv_cache.entries import SCORE_CHUNK
from kv_cache.refreshed import SelectionOps
from kv_cache.verify_topk import VerifyTopKCache


def chosen_by_lists(rows: Rows, row: int, layer: int, which: list[int]) -> list[set[int]]:
    """Return for each KV head the first chunk and the chunks that the queries at `which` attend to most."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill_row(0, text)
    queries = again.last_queries(0, text, len(text))[layer]
    keys, group = again.cache.keys[layer, 0], model.config.n_head // model.config.n_kv_head
    chosen = []
    for head, head_keys in enumerate(keys):
        received = [0.0] * -(-len(text) // SCORE_CHUNK)
        for i in which:
            for query in queries[head * group : (head + 1) * group, i]:
                weights = weights_by_lists(query, head_keys[: i + 1])
                for first in range(0, i + 1, SCORE_CHUNK):
                    received[first // SCORE_CHUNK] += max(weights[first : first + SCORE_CHUNK])
        best = [0, *sorted(range(1, len(received)), key=lambda chunk: -received[chunk])]
        entries = [SCORE_CHUNK * chunk + i for chunk in best for i in range(SCORE_CHUNK)]
        chosen.append({*[entry for entry in entries if entry < len(text) - WINDOW][:CHOSEN]})
    return chosen


def held(rows: Rows, row: int, layer: int, head: int, source: torch.Tensor) -> list[int]:
    """Return which of the target's entries the chosen slots hold."""
    own = rows.cache.keys[layer, row, head, :CHOSEN]
    return [int((source[head] == key).all(-1).nonzero()) for key in own]


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, n_kv_head=1), replace(TINY, n_head=6)], ids=["group 2", "group 4", "group 3"]
)
@pytest.mark.parametrize("score_queries", ["ends", "all"])
def test_rounds_choose_what_lists_do(config, score_queries):
    """Entries of ragged rows are chosen by the queries of accepted tokens; a short row keeps its whole text."""
    rows = Rows(topk_cache(config, score_queries=score_queries), tiny_model(config))
    short = rows.cache.entries[:, :, 1, :, : LENGTHS[1]].clone()
    heads_differ = False
    for n_accepted in ([1, 3, 3, 2], [3, 0, 1, 2]):
        lengths = [len(text) for text in rows.texts]
        rows.round(n_accepted)
        assert torch.equal(rows.cache.entries[:, :, 1, :, : LENGTHS[1]], short)
        for row in (0, 2, 3):
            first, last = lengths[row], lengths[row] + n_accepted[row]
            # The last accepted token's query counts once more for each rejected one.
            all_of_them = [*range(first, last), *[last] * (GAMMA + 1 - n_accepted[row])]
            for layer in range(config.n_layer):
                expected = chosen_by_lists(rows, row, layer, [first, last] if score_queries == "ends" else all_of_them)
                source = rows.runner.cache.entries[layer, :, row, :, : len(rows.texts[row])]
                heads_differ |= len(set(map(frozenset, expected))) > 1
                for head, wanted in enumerate(expected):
                    now = held(rows, row, layer, head, source[0])
                    assert set(now) == wanted and len(now) == CHOSEN
                    assert torch.equal(rows.cache.entries[layer, 1, row, head, :CHOSEN], source[1, head, now])
    assert heads_differ or config.n_kv_head == 1


@pytest.mark.parametrize("n_chosen", [8, 9, 80])
def test_of_equal_chunks_the_first_are_chosen_and_a_last_one_in_part(n_chosen):
    chunk, ends, share = 4, [80, 41, 42, 43, 16], torch.randint(4, (5, 2, 20)) / 4
    share[:, :, 10], share[4, :, 4:] = 1, 1
    chosen = SelectionOps().best_chunks(share, chunk, torch.tensor(ends), chunk, n_chosen)
    for row, end in enumerate(ends):
        for head, own in enumerate(share[row].tolist()):
            best = [0, *sorted(range(1, -(-end // chunk)), key=lambda i: -own[i])]
            entries = [entry for i in best for entry in range(chunk * i, min(chunk * (i + 1), end))]
            assert chosen[row, head].tolist()[: len(entries)] == entries[:n_chosen]


def test_scores_of_the_last_request_in_a_row_are_forgotten():
    """Scores of the last request may be NaN, and its blocks shorter."""
    chosen = []
    for left in (0.0, math.nan):
        rows = Rows(topk_cache())
        rows.round([1, 1, 1, 1])
        rows.drafter._scores.seen[:, 2] = left
        rows.fill(2)
        rows.round([1, 1, 1, 1], gamma=1)
        chosen.append(rows.cache.entries[:, :, 2].clone())
    assert torch.equal(*chosen)


@pytest.mark.parametrize("refresh,n_choices", [(1, 12), (7, 2)])
def test_entries_are_chosen_anew_every_refresh_rounds(refresh, n_choices, monkeypatch):
    runner, chosen = tiny_runner(1), []
    drafter = SelfSpeculation(runner, topk_cache(n_rows=1, refresh=refresh), GAMMA)
    choose = VerifyTopKCache.choose
    monkeypatch.setattr(VerifyTopKCache, "choose", lambda *given: chosen.append(1) or choose(*given))
    rounds = 0
    while rounds < 12:
        out = generate(runner, random_prompts([40], seed=rounds), max_new_tokens=2, drafter=drafter)
        rounds += len(out.stats.rounds)
    assert rounds == 12 and len(chosen) == n_choices
