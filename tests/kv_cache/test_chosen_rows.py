"""Policies that select entries: verify_topk, retrieval and snapkv equal selections on plain lists."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from engine import ModelRunner, SelfSpeculation, generate
from engine.batch import Batch
from engine.drafters import RowUpdate
from engine.round import Round
from engine.sampling.distribution import Filters
from kv_cache.base import EMPTY
from kv_cache.entries import SCORE_CHUNK
from kv_cache.refreshed import RefreshedKVCache, SelectionOps
from kv_cache.retrieval import Retrieval, RetrievalKVCache
from kv_cache.scored import ScoredKVCache
from kv_cache.snapkv import POOL, SnapKV
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache
from models.llama import select_layers
from tests.support.tiny import TINY, full_cache, random_prompts, tiny_model, tiny_runner, weights_by_lists

GAMMA, WINDOW, BUDGET, N_FIRST, CHUNK = 3, 6, 16, 2, 3
CHOSEN, LONGEST = BUDGET - WINDOW, 100
LENGTHS = [40, 9, 29, 53]


def topk_cache(config=TINY, n_rows: int = len(LENGTHS), dtype=torch.float64, **options) -> VerifyTopKCache:
    options = {"snapkv_window": WINDOW, "n_sink": N_FIRST, "refresh": 1} | options
    return VerifyTopKCache(config, n_rows, VerifyTopK(BUDGET, **options), "cpu", dtype)


def retrieval_cache(config=TINY, dtype=torch.float64, **options) -> RetrievalKVCache:
    options = {"snapkv_window": WINDOW, "n_sink": N_FIRST, "refresh": 1, "chunk": CHUNK} | options
    policy = Retrieval(BUDGET, **options)
    return RetrievalKVCache(config, len(LENGTHS), LONGEST, policy, "cpu", dtype)


def snapkv_cache(config=TINY, dtype=torch.float64) -> ScoredKVCache:
    return SnapKV(BUDGET, WINDOW).new_cache(config, len(LENGTHS), 0, "cpu", dtype)


class Rows:
    """Ragged rows of a self-draft, and rounds over some of them, after which entries are chosen anew."""

    def __init__(self, cache: VerifyTopKCache, model=None, kv_dtype=None, draft=(None, None)) -> None:
        self.model, self.texts = model or tiny_model(), random_prompts(LENGTHS)
        self.runner = ModelRunner(self.model, full_cache(self.model, len(LENGTHS), kv_dtype=kv_dtype))
        self.cache, self.batch = cache, Batch(len(LENGTHS), Filters())
        self.drafter = SelfSpeculation(self.runner, cache, GAMMA, *draft)
        for row in range(len(LENGTHS)):
            self.fill(row)
        # The KV of each row's last token is not in the cache yet.
        self.current = [5, 6, 7, 8]

    def fill(self, row: int) -> None:
        self.runner.prefill(row, self.texts[row])
        self.drafter.follow([RowUpdate(row, row, self.texts[row], 0)])

    def round(self, n_accepted: list[int], rows: list[int] | None = None, gamma: int = GAMMA) -> None:
        """Verify a block in each row; `n_accepted` drafts are accepted, and entries are chosen anew."""
        rows = list(range(len(LENGTHS))) if rows is None else rows
        batch = self.batch.first(len(rows))
        batch.rows.copy_(torch.tensor(rows))
        batch.set_state([len(self.texts[row]) for row in rows], [0] * len(rows), [self.current[row] for row in rows])
        drafts = torch.arange(gamma) + torch.tensor(rows)[:, None] * 3
        block = torch.cat([batch.current[:, None], drafts], dim=1)
        Round(self.runner, batch, self.drafter, gamma, "greedy").forward(block)
        for place, row in enumerate(rows):
            self.texts[row] = [*self.texts[row], *block[place, : 1 + n_accepted[place]].tolist()]
        batch.set_state([len(self.texts[row]) for row in rows], [0] * len(rows), [1] * len(rows))
        self.runner.cache.rollback(torch.tensor([len(text) for text in self.texts]))
        self.drafter.rollback(batch)
        if isinstance(self.cache, RefreshedKVCache):
            self.drafter.refresh(batch, gamma)


GROUPS = [TINY, replace(TINY, n_kv_head=1), replace(TINY, n_head=6)]
over_group_sizes = pytest.mark.parametrize("config", GROUPS, ids=["group 2", "group 4", "group 3"])
of_each_policy = pytest.mark.parametrize("new_cache", [topk_cache, retrieval_cache, snapkv_cache])


def means(rows: Rows) -> torch.Tensor:
    """Return the means of chunks by layer and row, empty for a policy without chunks."""
    return getattr(rows.cache, "means", rows.cache.entries[:, 0, :, :0])


@of_each_policy
def test_entries_of_8_bits_are_chosen_by_their_values(new_cache):
    """Entries are copied as they are between equal storages, and converted between others."""
    model, stored = tiny_model(dtype=torch.float32), torch.float8_e4m3fn
    same, wide = (Rows(new_cache(dtype=dtype), model, stored) for dtype in (stored, torch.float32))
    narrow, plain = (Rows(new_cache(dtype=dtype), model) for dtype in (stored, torch.float32))
    for rows in (same, wide, narrow, plain):
        rows.round([1, 1, 1, 1])
    for eight, full in ((same, wide), (narrow, plain)):
        values = eight.cache.entries.float() * eight.cache.scales[..., None]
        error = 0 if full is wide else 0.04 * values.abs().max()
        assert (values - full.cache.entries)[:, :, [0, 2, 3], :, :CHOSEN].abs().max() <= error
        assert torch.equal(means(eight).float(), means(full).float())
    assert not torch.equal(same.cache.entries.float(), narrow.cache.entries.float())


@of_each_policy
def test_a_draft_of_some_layers_chooses_by_those(new_cache):
    config = replace(TINY, n_layer=4)
    model = tiny_model(config)
    shallow = select_layers(model, [1, 3])
    every, some = Rows(new_cache(config), model), Rows(new_cache(shallow.config), model, draft=(shallow, [1, 3]))
    for rows in (every, some):
        rows.round([2, 2, 2, 2])
    assert torch.equal(some.cache.entries, every.cache.entries[[1, 3]])
    assert torch.equal(means(some), means(every)[[1, 3]])


def queries_and_keys(rows: Rows, row: int, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each KV head the queries `[group, n, D]` and the keys `[n, D]` of a row's text, computed anew."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill(0, text)
    keys = again.cache.keys[layer, 0, :, : len(text)]
    return [*zip(again.last_queries(0, text, len(text))[layer].unflatten(0, (len(keys), -1)), keys, strict=True)]


def chosen_by_lists(rows: Rows, row: int, layer: int, which: list[int]) -> list[set[int]]:
    """Return for each KV head the first chunk and the chunks that the queries at `which` attend to most."""
    n, chosen = len(rows.texts[row]), []
    for queries, keys in queries_and_keys(rows, row, layer):
        received = [0.0] * -(-n // SCORE_CHUNK)
        for i in which:
            for query in queries[:, i]:
                weights = weights_by_lists(query, keys[: i + 1])
                for first in range(0, i + 1, SCORE_CHUNK):
                    received[first // SCORE_CHUNK] += max(weights[first : first + SCORE_CHUNK])
        best = [0, *sorted(range(1, len(received)), key=lambda chunk: -received[chunk])]
        entries = [SCORE_CHUNK * chunk + i for chunk in best for i in range(SCORE_CHUNK)]
        chosen.append({*[entry for entry in entries if entry < n - WINDOW][:CHOSEN]})
    return chosen


@over_group_sizes
def test_rounds_choose_what_lists_do(config):
    """Entries of ragged rows, all or some by name, are chosen by the queries of accepted tokens; a short row keeps its
    whole text."""
    rows = Rows(topk_cache(config), tiny_model(config))
    short = rows.cache.entries[:, :, 1, :, : LENGTHS[1]].clone()
    heads_differ = False
    for n_accepted in ({0: 1, 1: 3, 2: 3, 3: 2}, {3: 2, 0: 3}, {1: 0, 3: 1, 2: 1}):
        lengths, before = [len(text) for text in rows.texts], rows.cache.entries.clone()
        rows.round([*n_accepted.values()], [*n_accepted])
        assert torch.equal(rows.cache.entries[:, :, 1, :, : LENGTHS[1]], short)
        for row in (0, 2, 3):
            if row not in n_accepted:
                assert torch.equal(rows.cache.entries[:, :, row], before[:, :, row])
                continue
            last = lengths[row] + n_accepted[row]
            # The last accepted token's query counts once more for each rejected one.
            which = [*range(lengths[row], last), *[last] * (GAMMA + 1 - n_accepted[row])]
            for layer in range(config.n_layer):
                expected = chosen_by_lists(rows, row, layer, which)
                source = rows.runner.cache.entries[layer, :, row, :, : len(rows.texts[row])]
                heads_differ |= len(set(map(frozenset, expected))) > 1
                for head, wanted in enumerate(expected):
                    kept = rows.cache.entries[layer, :, row, head, :CHOSEN]
                    now = [int((source[0, head] == key).all(-1).nonzero()) for key in kept[0]]
                    assert set(now) == wanted and len(now) == CHOSEN
                    assert torch.equal(kept[1], source[1, head, now])
    assert heads_differ or config.n_kv_head == 1


@pytest.mark.parametrize("n_chosen", [8, 9, 80])
def test_of_equal_chunks_the_first_are_chosen_and_a_last_one_in_part(n_chosen):
    chunk, ends, share = 4, [80, 41, 42, 43, 16], torch.randint(4, (5, 2, 20)) / 4
    share[:, :, 10], share[4, :, 4:] = 1, 1
    chosen = SelectionOps().best_chunks(share, chunk, torch.tensor(ends), chunk, n_chosen)
    for row, end in enumerate(ends):
        for head, shares in enumerate(share[row].tolist()):
            best = [0, *sorted(range(1, -(-end // chunk)), key=lambda i: -shares[i])]
            entries = [entry for i in best for entry in range(chunk * i, min(chunk * (i + 1), end))]
            assert chosen[row, head].tolist()[: len(entries)] == entries[:n_chosen]


def test_scores_of_the_last_request_in_a_row_are_forgotten():
    """Scores of the last request may be NaN, and its blocks shorter."""
    chosen = []
    for left in (0.0, math.nan):
        rows = Rows(topk_cache())
        rows.round([1, 1, 1, 1])
        rows.drafter.cache.scores.seen[:, 2] = left
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


# How many drafts are accepted in which rows.
ROUNDS = (
    {0: 3, 1: 0, 2: 1, 3: 2},
    {3: 0, 1: 3, 0: 2},
    {0: 2, 1: 3, 2: 3, 3: 1},
    {1: 3, 3: 3},
    {0: 0, 1: 3, 2: 0, 3: 1},
)


def attended_chunks(rows: Rows, row: int, layer: int) -> list[list[range]]:
    """Return for each KV head the chunks before the window: sinks, then by the last query's attention."""
    end, ordered = len(rows.texts[row]) - WINDOW, []
    for queries, keys in queries_and_keys(rows, row, layer):
        means = [sum(keys[start + i] for i in range(CHUNK)) / CHUNK for start in range(0, end, CHUNK)]
        received = [sum(weights) for weights in zip(*(weights_by_lists(q, means) for q in queries[:, -1]), strict=True)]
        order = sorted(range(len(means)), key=lambda i: -math.inf if i * CHUNK < N_FIRST else -received[i])
        ordered.append([range(i * CHUNK, min((i + 1) * CHUNK, end)) for i in order])
    return ordered


def require_retrieved(rows: Rows, row: int) -> None:
    """Require whole chunks, best first, as far as they fit, a part of the last, and none of the recent entries."""
    text, source = rows.texts[row], rows.runner.cache
    recent = [p for p in rows.cache.positions[row, CHOSEN:].tolist() if p != EMPTY]
    assert max(recent) == len(text) - 1
    for layer in range(rows.model.config.n_layer):
        for head, chunks in enumerate(attended_chunks(rows, row, layer)):
            kept = rows.cache.entries[layer, :, row, head, :CHOSEN]
            keys, values = source.entries[layer, :, row, head, : len(text)]
            now = [int((keys == key).all(-1).nonzero()) for key in kept[0]]
            assert torch.equal(kept[1], values[now]) and len({*now, *recent}) == len(now) + len(recent)
            left = CHOSEN
            for chunk in chunks:
                n_kept = len({*now} & {*chunk})
                assert n_kept == min(left, len(chunk))
                left -= n_kept


@over_group_sizes
def test_rounds_retrieve_what_lists_do(config):
    """In rounds of all rows and of some by name; a ragged row outgrows the capacity, and another gets a new prompt."""
    rows = Rows(retrieval_cache(config), tiny_model(config))
    for row in (0, 2, 3):
        require_retrieved(rows, row)
    for number, n_accepted in enumerate(ROUNDS):
        rows.round([*n_accepted.values()], [*n_accepted])
        if number == 2:
            rows.texts[2] = random_prompts([44], seed=7)[0]
            rows.fill(2)
        for row in range(4):
            if len(rows.texts[row]) > rows.cache.capacity:
                require_retrieved(rows, row)
    assert len(rows.texts[1]) > rows.cache.capacity


def selected_by_lists(queries: torch.Tensor, keys: torch.Tensor) -> list[int]:
    """Return the best entries before the window: by the attention of the window's queries, averaged over neighbours."""
    n_token, padded = len(keys), [0.0] * (len(keys) + 2 * (POOL // 2))
    for i in range(n_token - WINDOW, n_token):
        for query in queries[:, i]:
            for j, weight in enumerate(weights_by_lists(query, keys[: i + 1])[: n_token - WINDOW]):
                padded[j + POOL // 2] += weight
    best = sorted(range(n_token - WINDOW), key=lambda j: -sum(padded[j : j + POOL]))
    return sorted(best[:CHOSEN])


@over_group_sizes
def test_snapkv_selects_what_lists_do(config):
    """In every layer and head of ragged rows, the cache holds the target's entries of selected tokens and window."""
    rows = Rows(snapkv_cache(config), tiny_model(config))
    cache, source, heads_differ = rows.cache, rows.runner.cache, False
    for (row, n), layer in product(enumerate(LENGTHS), range(config.n_layer)):
        if n <= BUDGET:
            assert cache.positions[row, :n].tolist() == list(range(n))
            assert torch.equal(cache.keys[layer, row, :, :n], source.keys[layer, row, :, :n])
            continue
        window, selected = torch.arange(n - WINDOW, n), []
        slots = torch.cat([torch.arange(CHOSEN), cache.slots(window)])
        for head, (queries, keys) in enumerate(queries_and_keys(rows, row, layer)):
            selected.append(selected_by_lists(queries, keys))
            at = torch.cat([torch.tensor(selected[-1]), window])
            assert torch.equal(cache.entries[layer, :, row, head, slots], source.entries[layer, :, row, head, at])
        heads_differ |= selected[0] != selected[-1]
    assert heads_differ or config.n_kv_head == 1
