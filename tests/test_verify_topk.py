"""What verification's queries choose, against a selection on plain lists; when they do, and what stays as it was."""

import math
from dataclasses import replace

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, tiny_model

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation, generate
from engine.batch import Batch
from engine.drafters import Shown
from engine.round import Round
from engine.sampling import Filters
from kv_cache import EMPTY, VerifyTopK, VerifyTopKCache
from models.llama import select_layers

GAMMA, WINDOW, BUDGET, N_FIRST = 3, 6, 16, 2
CHOSEN = BUDGET - WINDOW
LENGTHS = [40, 9, 29, 53]


def draft_cache(config=TINY, n_rows: int = len(LENGTHS), dtype=torch.float64, **options) -> VerifyTopKCache:
    options = {"n_sink": N_FIRST, "refresh": 1} | options
    return VerifyTopKCache(config, n_rows, VerifyTopK(BUDGET, WINDOW, **options), "cpu", dtype)


class Rows:
    """Ragged rows of a self-draft, and rounds over some of them, behind which entries are chosen anew."""

    choosing = True

    def __init__(self, cache: VerifyTopKCache, model=None, kv_dtype=None, draft=(None, None)) -> None:
        self.model, self.texts = model or tiny_model(), random_prompts(LENGTHS)
        self.runner = ModelRunner(self.model, full_cache(self.model, len(LENGTHS), kv_dtype=kv_dtype))
        self.cache, self.batch = cache, Batch(len(LENGTHS), Filters())
        self.drafter = SelfSpeculation(self.runner, cache, GAMMA, *draft)
        for row in range(len(LENGTHS)):
            self.fill(row)
        # What each row's last token's KV is for is not in the cache yet.
        self.current = [5, 6, 7, 8]

    def fill(self, row: int) -> None:
        self.runner.prefill_row(row, self.texts[row])
        self.drafter.follow([Shown(row, row, self.texts[row], 0)])

    def round(self, n_accepted: list[int], rows: list[int] | None = None, gamma: int = GAMMA) -> None:
        """Verify a block behind those rows, of which so many drafts stand."""
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
        if self.choosing:
            self.drafter.refresh(batch, gamma)


def chosen_by_lists(rows: Rows, row: int, layer: int, which: list[int]) -> list[set[int]]:
    """Of each KV head: the first tokens, and of those before the window what the queries at `which` attend to most."""
    text, model = rows.texts[row], rows.model
    again = ModelRunner(model, full_cache(model, 1))
    again.prefill_row(0, text)
    queries = again.last_queries(0, text, len(text))[layer]
    keys, group = again.cache.keys[layer, 0], model.config.n_head // model.config.n_kv_head
    chosen = []
    for head, own_keys in enumerate(keys):
        received = [0.0] * len(text)
        for i in which:
            for query in queries[head * group : (head + 1) * group, i]:
                weights = [math.exp(float(query @ own_keys[j]) / math.sqrt(len(query))) for j in range(i + 1)]
                for j, weight in enumerate(weights):
                    received[j] += weight / sum(weights)
        pooled = [max(received[max(0, j - 2) : j + 3]) * (1 - j % 5 * 2**-20) for j in range(len(text))]
        others = sorted(range(N_FIRST, len(text) - WINDOW), key=lambda j: -pooled[j])
        chosen.append({*range(N_FIRST), *others[: CHOSEN - N_FIRST]})
    return chosen


def held(rows: Rows, row: int, layer: int, head: int, source: torch.Tensor) -> list[int]:
    """Which of the target's entries the chosen slots hold."""
    own = rows.cache.keys[layer, row, head, :CHOSEN]
    return [int((source[head] == key).all(-1).nonzero()) for key in own]


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, n_kv_head=1), replace(TINY, n_head=6)], ids=["group 2", "group 4", "group 3"]
)
@pytest.mark.parametrize("score_queries", ["ends", "all"])
def test_a_round_chooses_what_lists_do(config, score_queries):
    """Ragged rows, by the queries of what stands; a short row keeps its whole text."""
    rows, n_accepted = Rows(draft_cache(config, score_queries=score_queries), tiny_model(config)), [1, 3, 3, 2]
    short = rows.cache.entries[:, :, 1].clone()
    rows.round(n_accepted)
    assert torch.equal(rows.cache.entries[:, :, 1, :, :9], short[:, :, :, :9])
    heads_differ = False
    for row in (0, 2, 3):
        first, last = LENGTHS[row], LENGTHS[row] + n_accepted[row]
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


def test_rows_by_name_choose_as_all_do_and_others_stay():
    """Some of the rows, in another order and with fewer drafts, of which queries of a longer block are left over."""
    together, apart = Rows(draft_cache()), Rows(draft_cache())
    for one in (together, apart):
        one.round([0, 0, 0, 0])
    together.round([2, 1, 0, 2], gamma=2)
    before = apart.cache.entries[:, :, 1:3].clone()
    apart.round([2, 2], rows=[3, 0], gamma=2)
    for row in (0, 3):
        torch.testing.assert_close(apart.cache.entries[:, :, row], together.cache.entries[:, :, row])
    assert torch.equal(apart.cache.entries[:, :, 1:3], before)


def test_a_row_that_was_filled_anew_keeps_what_its_prompt_chose():
    rows = Rows(draft_cache())
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
    model, chosen = tiny_model(), []
    runner, cache = ModelRunner(model, full_cache(model, 1)), draft_cache(n_rows=1, refresh=refresh)
    drafter = SelfSpeculation(runner, cache, GAMMA)
    choose = VerifyTopKCache.choose
    monkeypatch.setattr(VerifyTopKCache, "choose", lambda *given: chosen.append(1) or choose(*given))
    rounds = 0
    while rounds < 12:
        out = generate(runner, random_prompts([40], seed=rounds), max_new_tokens=2, drafter=drafter)
        rounds += len(out.stats.rounds)
    assert rounds == 12 and len(chosen) == n_choices


def test_the_round_before_a_choice_is_the_one_that_is_noted(monkeypatch):
    model, n_noted = tiny_model(), []
    runner = ModelRunner(model, full_cache(model, 2))
    choose = VerifyTopKCache.choose

    def watched(own, source, lengths, noted, *others):
        n_noted.extend((lengths - noted.starts[own.row_indices]).tolist())
        choose(own, source, lengths, noted, *others)

    monkeypatch.setattr(VerifyTopKCache, "choose", watched)
    drafter = SelfSpeculation(runner, draft_cache(n_rows=2, refresh=3), GAMMA)
    generate(runner, random_prompts([40, 25]), max_new_tokens=60, drafter=drafter)
    assert len(n_noted) > 10 and {*n_noted} <= {*range(GAMMA + 2)}  # 0 of a row that idles


def test_the_draft_never_holds_a_token_twice():
    """Round by round of a decode: what was chosen lies before the window, whatever was accepted and rolled back."""
    rows = Rows(draft_cache())
    for n_accepted in ([3, 0, 1, 2], [0, 3, 3, 0], [2, 3, 3, 1], [3, 3, 3, 3], [0, 0, 0, 1]):
        rows.round(n_accepted)
        for row, text in enumerate(rows.texts):
            recent = [p for p in rows.cache.positions[row, CHOSEN:].tolist() if p != EMPTY]
            if len(text) <= BUDGET:
                continue
            for layer in range(TINY.n_layer):
                for head in range(TINY.n_kv_head):
                    now = held(rows, row, layer, head, rows.runner.cache.keys[layer, row, :, : len(text)])
                    assert len({*now, *recent}) == len(now) + len(recent) and {*range(N_FIRST)} <= {*now}


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_entries_of_8_bits_are_chosen_and_copied_with_their_scales(stored):
    """From 8 bits to 8 bits as they are; to more bits as they read; from more bits as the prompt's are stored."""
    model = tiny_model(dtype=torch.float32)
    same, wide = (Rows(draft_cache(dtype=dtype), model, stored) for dtype in (stored, torch.float32))
    narrow, plain = (Rows(draft_cache(dtype=dtype), model) for dtype in (stored, torch.float32))
    for rows in (same, wide, narrow, plain):
        rows.round([1, 1, 1, 1])
    for eight, full in ((same, wide), (narrow, plain)):
        values = eight.cache.entries.float() * eight.cache.scales[..., None]
        error = 0 if full is wide else 0.04 * values.abs().max()
        assert (values - full.cache.entries)[:, :, [0, 2, 3], :, :CHOSEN].abs().max() <= error
    assert not torch.equal(same.cache.entries.float(), narrow.cache.entries.float())


def test_a_draft_of_some_layers_chooses_by_those():
    config = replace(TINY, n_layer=4)
    model = tiny_model(config)
    shallow = select_layers(model, [1, 3])
    every, some = Rows(draft_cache(config), model), Rows(draft_cache(shallow.config), model, draft=(shallow, [1, 3]))
    for rows in (every, some):
        rows.round([2, 2, 2, 2])
    assert torch.equal(some.cache.entries, every.cache.entries[[1, 3]])


def test_what_cannot_work_is_refused():
    for options, message in (
        ({"refresh": 0}, "refresh"),
        ({"n_sink": CHOSEN}, "no room for chosen entries"),
        ({"n_sink": -1}, "no room for chosen entries"),
    ):
        with pytest.raises(ConfigError, match=message):
            draft_cache(**options)
