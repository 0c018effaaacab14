"""Prompts that run in parts between rounds, and after what their row still holds of an earlier request's text."""

from functools import partial

import pytest
import torch

from engine import Decoder, ModelRunner, Request, SamplingParams, StandaloneDraft
from engine.controller import Fixed
from engine.drafters import Drafter
from kv_cache import FullKVCache, StreamingKVCache
from tests.support.block_heads import with_head
from tests.support.tiny import (
    continue_by_recomputing,
    decode,
    full_cache,
    near_model,
    random_prompts,
    tiny_model,
    tiny_runner,
)
from tests.support.witness import witness_runner


class Counting(ModelRunner):
    """Notes how many tokens each forward ran, and of how many rows."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.model, self.ran = tiny_model(), []
        hidden = self.model.hidden
        self.model.hidden = lambda tokens, *rest: self.ran.append(tuple(tokens.shape)) or hidden(tokens, *rest)


def counting(n_rows: int, seed: int = 0) -> Counting:
    model = tiny_model(seed=seed)
    return Counting(model, full_cache(model, n_rows))


def test_a_row_that_decodes_waits_for_one_chunk_at_most():
    """Chunks of the target and of a draft model are bounded, however many long prompts wait."""
    target, own = counting(3), counting(3, seed=5)
    decoder = Decoder(target, Fixed(StandaloneDraft(own, 2)), prefill_tokens=8)
    prompts = random_prompts([5, 60, 41])
    first, *others = (Request(prompt, 40) for prompt in prompts)
    decoder.submit(first)
    assert decoder.step().busy == 1
    for request in others:
        decoder.submit(request)
    while not first.finish_reason:
        target.ran.clear(), own.ran.clear()
        n_tokens, stats = len(first.tokens), decoder.step()
        assert stats.busy and len(first.tokens) > n_tokens
        for ran, again in ((target.ran, 0), (own.ran, 1)):  # a draft model runs its last known token once more
            prefilled = [n for rows, n in ran if rows == 1]
            assert len(prefilled) <= 1 and sum(prefilled) <= 8 + again
    decode(decoder)
    model = tiny_model()
    for request in (first, *others):
        assert request.tokens == continue_by_recomputing(model, request.prompt, request.limit)


def catching_up(kind: str, target: Counting) -> tuple[Drafter, list[int]]:
    """A drafter that runs all of a text, and how many tokens of one it runs at once."""
    if kind == "standalone":
        own, ran = counting(2, seed=5), []
        extend = own.extend
        own.extend = lambda texts: ran.extend(len(text) - n for text, n in texts.values()) or extend(texts)
        return StandaloneDraft(own, 2), ran
    ran, again = [], target.recompute
    target.recompute = lambda row, text, at, layers=(): ran.append(len(at)) or again(row, text, at, layers)
    return with_head(kind, target, lambda shape: FullKVCache(shape, 2, 128, dtype=torch.float64), 2), ran


@pytest.mark.parametrize("kind", ["standalone", "eagle-3", "dflash"])
def test_a_drafter_that_missed_much_catches_up_in_chunks(kind):
    """Rows decode meanwhile, by plain rounds; then it drafts."""
    target = counting(2)
    drafter, ran = catching_up(kind, target)
    decoder = Decoder(target, drafter=drafter, prefill_tokens=8)
    plain, *others = (Request(prompt, 60, speculate=i > 0) for i, prompt in enumerate(random_prompts([3, 60])))
    for request in (plain, *others):
        decoder.submit(request)
    while len(others[0].tokens) < 20:
        decoder.step()
    decoder.cancel(plain)
    choices = []
    while not decoder.idle:
        ran.clear(), target.ran.clear()
        n_tokens, choice = len(others[0].tokens), decoder.step().choice
        choices.append(choice.drafter)
        assert len(others[0].tokens) > n_tokens and sum(ran) <= 8 + 2 + 2 * (drafter.gamma + 2)
    n_plain = choices.index(0)
    assert 8 <= n_plain <= 10 and {*choices[n_plain:]} == {0}
    model = tiny_model()
    assert others[0].tokens == continue_by_recomputing(model, others[0].prompt, 60)


@pytest.mark.parametrize("kind", ["eagle-3", "P-EAGLE", "dflash"])
def test_a_head_drafts_while_a_row_that_held_a_longer_text_fills(kind):
    """The row idles meanwhile, and its last state is at a position that the round's slots do not have."""
    target = tiny_runner(2, prefill_chunk=8)
    new_cache = partial(StreamingKVCache, max_batch=2, budget=64, dtype=torch.float64)
    decoder = Decoder(target, drafter=with_head(kind, target, new_cache, 3), prefill_tokens=8)
    long, short, again = (Request(p, n) for p, n in zip(random_prompts([48, 3, 60]), (8, 70, 9), strict=True))
    decoder.submit(long), decoder.submit(short)
    while not long.finish_reason:
        decoder.step()
    decode(decoder, again)
    for request in (long, short, again):
        assert request.tokens == continue_by_recomputing(target.model, request.prompt, request.limit)


@pytest.mark.parametrize("parts", [None, 8])
def test_the_next_turn_of_a_conversation_runs_what_is_new(parts):
    """After the answer, on the target and on a draft model, while another conversation has another row."""
    target, own = counting(2), counting(2, seed=5)
    decoder = Decoder(target, Fixed(StandaloneDraft(own, 2)), prefill_tokens=parts, reuses="prefixes")
    turns = [Request(prompt, 9) for prompt in random_prompts([50, 45])]

    def answer(*requests: Request) -> None:
        target.ran.clear(), own.ran.clear()
        decode(decoder, *requests)
        for request in requests:
            assert request.tokens == continue_by_recomputing(tiny_model(), request.prompt, request.limit)

    answer(*turns)
    for request in turns[::-1]:
        follow_up = Request([*request.prompt, *request.tokens, 5, 7, 11], 6)
        answer(follow_up)
        assert follow_up.n_reused == len(follow_up.prompt) - 4  # the last token emitted was never run
        assert max(n for _, n in target.ran) == 4 and max(n for _, n in own.ran) <= 5
    answer(again := Request(turns[0].prompt, 9))
    assert again.n_reused == len(again.prompt) - 1 and max(n for _, n in target.ran) == 3


@pytest.mark.parametrize("parts", [None, 8])
def test_without_reuse_earlier_requests_change_no_forward(parts):
    """A prompt that a row holds whole or in part, or that another request brings at the same time, runs whole; target,
    draft and acceptance are what they are after texts that have nothing in common with it."""

    def work_after(earlier: list[list[int]], prompts: list[list[int]]) -> tuple[object, ...]:
        target, own = counting(3), counting(3, seed=5)
        decoder = Decoder(target, drafter=StandaloneDraft(own, 2), prefill_tokens=parts, reuses="nothing")
        decode(decoder, *(Request(prompt, 9, id=i) for i, prompt in enumerate(earlier)))
        target.ran.clear(), own.ran.clear()
        decode(decoder, *(requests := [Request(prompt, 9, id=i) for i, prompt in enumerate(prompts)]))
        assert [request.n_reused for request in requests] == [0] * len(prompts)
        assert sum(n for rows, n in target.ran if rows == 1) == sum(map(len, prompts))
        return target.ran, own.ran, [(request.tokens, request.counts) for request in requests]

    [first, second], others = random_prompts([30, 11]), random_prompts([30, 11], seed=7)
    for prompts in ([first, second], [[*first, 5, 7], second[:6]], [first, first, second], [second, first]):
        assert work_after([first, second], prompts) == work_after(others, prompts)


def test_a_prompt_takes_the_row_that_holds_half_of_it_or_the_one_left_longest_ago():
    runner = witness_runner(3)
    decoder = Decoder(runner, reuses="prefixes")

    def row_of(prompt: list[int]) -> tuple[int, int]:
        decode(decoder, request := Request(prompt, 2))
        held = [runner.shared_prefix(row, prompt) for row in range(3)]
        return held.index(max(held)), request.n_reused

    assert [row_of([n] * 8) for n in (1, 2, 3)] == [(0, 0), (1, 0), (2, 0)]
    assert row_of([2] * 8 + [4]) == (1, 8)
    assert row_of([1, 1, 5, 5, 5, 5]) == (0, 2)  # left longest ago, and of what it holds the beginning is the same
    assert row_of([2, 2, 6, 6, 6]) == (2, 0)  # row 1 holds less than half of it, and was left later
    assert row_of([2, 2, 2]) == (1, 2)


@pytest.mark.parametrize("reuses", ["prefixes", "nothing"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_requests_of_a_group_run_their_prompt_once(reuses, kv_dtype):
    """Next to another request, in rows that held other texts; each gets the tokens and drafts that it gets alone."""
    model, (prompt, *others) = tiny_model(), random_prompts([25, 25, 9, 31])
    sampling = [SamplingParams(1.2, seed=seed) for seed in range(3)]

    def requests(group: int | None) -> list[Request]:
        alike = [Request(prompt, 40 + seed, sampling=how, group=group) for seed, how in enumerate(sampling)]
        return [alike[0], Request(others[0], 12), *alike[1:]]

    def run(group: int | None) -> tuple[list[Request], list[int]]:
        runner, draft = ModelRunner(model, full_cache(model, 4, kv_dtype=kv_dtype)), near_model()
        drafter = StandaloneDraft(ModelRunner(draft, full_cache(draft, 4)), 3)
        how = {"drafter": drafter, "verification": "coupled", "prefill_tokens": 200, "reuses": reuses}
        decoder = Decoder(runner, **how)
        decode(decoder, *(Request(other, 3) for other in [*others, others[0]]))
        decode(decoder, *(some := requests(group)))
        return some, [request.n_reused for request in some]

    (alone, ran), (together, n_reused) = run(None), run(0)
    assert [(each.tokens, each.counts) for each in together] == [(each.tokens, each.counts) for each in alone]
    assert ran[0] == ran[2] == 0 and (n_reused[0], n_reused[2], n_reused[3]) == (0, 25, 25)
