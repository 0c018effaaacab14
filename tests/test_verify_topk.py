"""What verification's queries choose, against a selection on plain lists; when they do, and what stays as it was."""

import math
from dataclasses import replace

import pytest
import torch
from chosen_rows import CHOSEN, GAMMA, LENGTHS, WINDOW, Rows, topk_cache
from tiny import TINY, full_cache, random_prompts, tiny_model, tiny_runner

from engine import ModelRunner, SelfSpeculation, generate
from kv_cache.entries import SCORE_CHUNK
from kv_cache.refreshed import SelectionOps
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache
from models.attention import TorchAttention


def chosen_by_lists(rows: Rows, row: int, layer: int, which: list[int]) -> list[set[int]]:
    """Of each KV head: the first chunk, and of those before the window what the queries at `which` attend to most."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill_row(0, text)
    queries = again.last_queries(0, text, len(text))[layer]
    keys, group = again.cache.keys[layer, 0], model.config.n_head // model.config.n_kv_head
    chosen = []
    for head, own_keys in enumerate(keys):
        received = [0.0] * -(-len(text) // SCORE_CHUNK)
        for i in which:
            for query in queries[head * group : (head + 1) * group, i]:
                weights = [math.exp(float(query @ own_keys[j]) / math.sqrt(len(query))) for j in range(i + 1)]
                for first in range(0, i + 1, SCORE_CHUNK):
                    received[first // SCORE_CHUNK] += max(weights[first : first + SCORE_CHUNK]) / sum(weights)
        best = [0, *sorted(range(1, len(received)), key=lambda chunk: -received[chunk])]
        entries = [SCORE_CHUNK * chunk + i for chunk in best for i in range(SCORE_CHUNK)]
        chosen.append({*[entry for entry in entries if entry < len(text) - WINDOW][:CHOSEN]})
    return chosen


def held(rows: Rows, row: int, layer: int, head: int, source: torch.Tensor) -> list[int]:
    """Which of the target's entries the chosen slots hold."""
    own = rows.cache.keys[layer, row, head, :CHOSEN]
    return [int((source[head] == key).all(-1).nonzero()) for key in own]


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, n_kv_head=1), replace(TINY, n_head=6)], ids=["group 2", "group 4", "group 3"]
)
@pytest.mark.parametrize("score_queries", ["ends", "all"])
def test_rounds_choose_what_lists_do(config, score_queries):
    """Ragged rows, by the queries of what stands; a short row keeps its whole text."""
    rows = Rows(topk_cache(config, score_queries=score_queries), tiny_model(config))
    short = rows.cache.entries[:, :, 1, :, : LENGTHS[1]].clone()
    heads_differ = False
    for n_accepted in ([1, 3, 3, 2], [3, 0, 1, 2]):
        lengths = [len(text) for text in rows.texts]
        rows.round(n_accepted)
        assert torch.equal(rows.cache.entries[:, :, 1, :, : LENGTHS[1]], short)
        for row in (0, 2, 3):
            first, last = lengths[row], lengths[row] + n_accepted[row]
            # The last token that stands has a say for each rejected one, too.
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


@pytest.mark.parametrize("n_chosen", [8, 9, 12, 80])
def test_of_equal_chunks_the_first_are_chosen_and_of_one_that_ends_what_there_is(n_chosen):
    chunk, ends, share = 4, [80, 41, 42, 43, 16], torch.randint(4, (5, 2, 20)) / 4
    share[:, :, 10], share[4, :, 4:] = 1, 1
    chosen = SelectionOps().best_chunks(share, chunk, torch.tensor(ends), chunk, n_chosen)
    for row, end in enumerate(ends):
        for head, own in enumerate(share[row].tolist()):
            best = [0, *sorted(range(1, -(-end // chunk)), key=lambda i: -own[i])]
            entries = [entry for i in best for entry in range(chunk * i, min(chunk * (i + 1), end))]
            assert chosen[row, head].tolist()[: len(entries)] == entries[:n_chosen]


def test_a_row_that_holds_its_whole_text_keeps_it_in_order():
    rows = Rows(VerifyTopKCache(TINY, len(LENGTHS), VerifyTopK(40, WINDOW), "cpu", torch.float64))
    before = rows.cache.entries[:, :, 2, :, : LENGTHS[2]].clone()
    rows.round([1, 1, 1, 1])
    assert torch.equal(rows.cache.entries[:, :, 2, :, : LENGTHS[2]], before)


def test_what_a_request_left_in_a_row_has_no_say_in_what_the_next_one_chooses():
    """Not even where these were no numbers, and blocks are shorter now."""
    chosen = []
    for left in (0.0, math.nan):
        rows = Rows(topk_cache())
        rows.round([1, 1, 1, 1])
        rows.drafter._scores.seen[:, 2] = left
        rows.fill(2)
        rows.round([1, 1, 1, 1], gamma=1)
        chosen.append(rows.cache.entries[:, :, 2].clone())
    assert torch.equal(*chosen)


def test_a_row_that_was_filled_anew_keeps_what_its_prompt_chose():
    rows = Rows(topk_cache())
    rows.round([1, 1, 1, 1])
    rows.texts[2] = random_prompts([44], seed=7)[0]
    rows.fill(2)
    after_prompt, others = rows.cache.entries[:, :, 2].clone(), rows.cache.entries[:, :, 0].clone()
    batch = rows.batch
    batch.set_state([len(text) for text in rows.texts], [0] * 4, [1] * 4)
    rows.drafter.refresh(batch, GAMMA)
    assert torch.equal(rows.cache.entries[:, :, 2], after_prompt)
    assert torch.equal(rows.cache.entries[:, :, 0], others), "chosen again by the same queries, it is the same"


@pytest.mark.parametrize("refresh,n_choices", [(1, 12), (3, 4), (7, 2)])
def test_entries_are_chosen_anew_every_so_many_rounds(refresh, n_choices, monkeypatch):
    runner, chosen = tiny_runner(1), []
    drafter = SelfSpeculation(runner, topk_cache(n_rows=1, refresh=refresh), GAMMA)
    choose = VerifyTopKCache.choose
    monkeypatch.setattr(VerifyTopKCache, "choose", lambda *given: chosen.append(1) or choose(*given))
    rounds = 0
    while rounds < 12:
        out = generate(runner, random_prompts([40], seed=rounds), max_new_tokens=2, drafter=drafter)
        rounds += len(out.stats.rounds)
    assert rounds == 12 and len(chosen) == n_choices


def test_the_round_before_a_choice_is_the_one_that_is_noted(monkeypatch):
    runner, n_noted = tiny_runner(2), []
    choose = VerifyTopKCache.choose

    def watched(own, source, lengths, noted, *others):
        n_noted.extend((lengths - noted.starts[own.row_indices]).tolist())
        choose(own, source, lengths, noted, *others)

    monkeypatch.setattr(VerifyTopKCache, "choose", watched)
    drafter = SelfSpeculation(runner, topk_cache(n_rows=2, refresh=3), GAMMA)
    generate(runner, random_prompts([40, 25]), max_new_tokens=60, drafter=drafter)
    assert len(n_noted) > 10 and {*n_noted} <= {*range(GAMMA + 2)}  # 0 of a row that idles


def test_a_kernel_that_fails_is_replaced_and_it_is_said_once(monkeypatch, capsys):
    """As Triton's does here, where it has no GPU."""
    pytest.importorskip("triton")
    found = []
    for tries in (False, True):
        monkeypatch.setattr("engine.drafters.self_speculation.triton_reads", lambda entries, tries=tries: tries)
        rows = Rows(topk_cache(TINY), tiny_model())
        rows.drafter._target.model.backend = TorchAttention()
        for n_accepted in ([1, 3, 3, 2], [3, 0, 1, 2]):
            rows.round(n_accepted)
        found.append(rows.cache.entries.clone())
    assert torch.equal(*found) and capsys.readouterr().err.count("PyTorch chooses entries") == 1
