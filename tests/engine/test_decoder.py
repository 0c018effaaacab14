"""A decoder whose requests come and go between its steps, and whose prompts run in parts or are held by rows."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, StandaloneDraft, generate
from engine.controller import PLAIN, Fixed, RoundChoice
from engine.drafters import Drafter
from engine.requests import Progress
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.streaming import Streaming
from tests.support.controllers import Scripted
from tests.support.drafters import three_drafters
from tests.support.heads import with_head
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.scenarios import random_sampling
from tests.support.tiny import (
    continue_by_recomputing,
    continue_plainly,
    decode,
    full_cache,
    near_model,
    random_prompts,
    recomputed,
    self_draft,
    tiny_model,
    tiny_runner,
)
from tests.support.witness import VOCAB, cut, next_logits, witness_runner

SCRIPT = (PLAIN, RoundChoice(0, 3), RoundChoice(1, 2), RoundChoice(1, 3), RoundChoice(2, 3), PLAIN, RoundChoice(0, 1))
WARM = SamplingParams(1.5, top_k=20, seed=3)


def random_requests(rng: random.Random, mode: str) -> list[Request]:
    """Most prompts begin with a part, or all, of the text that an earlier request ends with."""
    texts, requests = [[rng.randrange(VOCAB)]], []
    for id_ in range(14):
        begin = rng.choice(texts)
        begin = begin[: rng.choice([len(begin), rng.randint(0, len(begin))])][:30]
        prompt = begin + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 9]) or not begin)]
        sampling = SamplingParams() if mode == "greedy" else random_sampling(rng)
        stops = rng.sample(range(VOCAB), rng.choice([0, 0, 1]))
        requests.append(Request(prompt, rng.randint(1, 16), stops, sampling, id_))
        texts.append(prompt + expected(requests[-1]))
    return requests


def expected(request: Request) -> list[int]:
    future = continue_plainly(next_logits, request.prompt, request.limit, request.sampling, request.id)
    return cut(future, list(request.stop_tokens))


class Cancelling(Progress):
    """Submits requests between steps, and cancels some now and then, also in callbacks, whatever they do."""

    decoder: Decoder

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.submitted, self.cancelled = rng, list[Request](), set[Request]()

    def run(self, requests: list[Request]) -> None:
        waiting = list(requests)
        while waiting or not self.decoder.idle:
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                if waiting:
                    self.submitted.append(waiting.pop(0))
                    self.decoder.submit(self.submitted[-1])
            self.cancel(0.06)
            self.decoder.step()

    def cancel(self, chance: float) -> None:
        if self.submitted and self.rng.random() < chance:
            request = self.rng.choice(self.submitted)
            if request.finish_reason is None:
                self.cancelled.add(request)
            self.decoder.cancel(request)

    def emitted(self, n_tokens: int) -> None:
        self.cancel(0.03)

    def finished(self, request: Request) -> None:
        assert request not in self.cancelled
        self.cancel(0.06)


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("seed", range(16))
def test_each_request_gets_what_it_gets_alone(seed, mode):
    """Rows of any kind join and leave, in chunks or at once, after what rows hold or not; drafters change from round
    to round, and meet requests late or never."""
    rng = random.Random(f"{seed} {mode}")
    runner, reuses = witness_runner(rng.randint(1, 4)), seed % 2 == 1
    requests, controller = random_requests(rng, mode), Scripted(three_drafters(runner), SCRIPT)
    how = {"prefill_tokens": rng.choice([1, 3, 7, None]), "reuses": "prefixes" if reuses else "prompts"}
    driver = Cancelling(rng)
    driver.decoder = Decoder(runner, controller, verification=mode, progress=driver, **how)
    driver.run(requests)
    for request in requests:
        if request in driver.cancelled:
            assert request.finish_reason == "cancelled" and request.tokens == expected(request)[: len(request.tokens)]
        else:
            assert request.tokens == expected(request) and request.finish_reason in ("length", "stop")
        assert len(request.tokens) == request.counts.emitted + bool(request.tokens)
        assert 0 <= request.n_reused <= len(request.prompt)
    assert driver.decoder.step() is None and (not reuses or any(request.n_reused > 1 for request in requests))


def test_a_request_that_samples_in_a_new_way_disturbs_nobody():
    """In `auto` the first that samples ends greedy verification, and each new filter makes new rounds."""
    model, prompts = tiny_model(), random_prompts([30, 11, 7, 19, 13])
    samplings = [SamplingParams(), WARM, SamplingParams(0.9, top_p=0.7, seed=4), SamplingParams(1.1, seed=5)]
    given = [*enumerate(zip(prompts, [*samplings, SamplingParams()], strict=True))]
    alone, graphs = list[list[int]](), list[RecordedGraph]()
    for new_graphs in (None, partial(RecordedGraphs, recorded=graphs)):
        runner = ModelRunner(model, full_cache(model, 2), new_graphs=new_graphs)
        controller = Fixed(self_draft(runner, Streaming(12, n_sink=2), 3))
        if not alone:
            how = {"max_new_tokens": 24, "controller": controller}
            alone = [generate(runner, [p], sampling=way, request_ids=[i], **how).tokens[0] for i, (p, way) in given]
        decoder, requests = Decoder(runner, controller), []
        for i, (prompt, sampling) in given:
            requests.append(Request(prompt, 24, sampling=sampling, id=i))
            decoder.submit(requests[-1])
            for _ in range(4):
                decoder.step()
        decode(decoder)
        assert [request.tokens for request in requests] == alone
    assert graphs and alone[0] == continue_by_recomputing(model, prompts[0], 24)


def counting(n_rows: int, seed: int = 0, **how) -> Any:
    """Return a runner whose `ran` notes of how many rows each forward ran how many tokens."""
    model = tiny_model(seed=seed)
    runner, hidden = ModelRunner(model, full_cache(model, n_rows), **how), model.hidden
    runner.ran = []
    model.hidden = lambda tokens, *rest: runner.ran.append(tuple(tokens.shape)) or hidden(tokens, *rest)
    return runner


@pytest.mark.parametrize(
    "new_graphs,fewest,share,expected",
    [
        # The second of a kind is called once more, to compare what its graph gives.
        (RecordedGraphs, 1, 1.0, [5, 5, 5, 4, 4, 4, 2, 1]),
        (None, 2, 1.0, [5, 5, 4, 3, 2, 2]),
        (None, 1, 1.0, [5, 5, 4, 3, 2, 1]),
        (None, 1, 0.9, [5, 5, 4, 3, 2, 2]),  # the mass of a row is added up
    ],
)
@pytest.mark.parametrize("name", ["typical_p", "top_p"])
def test_a_round_computes_the_rows_that_decode(monkeypatch, new_graphs, fewest, share, expected, name):
    """Five rows end one by one; captured rounds are made for 1, 2, 4 and all, called ones for `fewest` or more."""
    runner = counting(5, new_graphs=new_graphs, fewest_rows=fewest)
    sampling = SamplingParams(0.8, **{name: share})
    monkeypatch.setattr("engine.sampling.distribution._kernel", lambda: None)  # it adds up in one order
    decoder, prompts = Decoder(runner, verification="coupled"), random_prompts([9, 4, 17, 6, 11])
    requests = [Request(prompt, 3 + n, sampling=sampling, id=n) for n, prompt in enumerate(prompts)]
    for request in requests:
        decoder.submit(request)
    assert [step.busy for step in iter(decoder.step, None)] == [5, 5, 4, 3, 2, 1]
    assert [n_rows for n_rows, n_token in runner.ran if n_token == 1] == expected
    wanted = recomputed(tiny_model(), prompts, [request.limit for request in requests], sampling)
    assert [request.tokens for request in requests] == wanted


def test_a_request_that_was_submitted_or_has_other_types_is_refused():
    decoder, request = Decoder(witness_runner(2)), Request([5, 1, 7], 4)
    decoder.submit(request)
    with pytest.raises(ConfigError):
        Decoder(witness_runner(2)).submit(request)
    for field, value in (("prompt", [1, 2.0]), ("stop_tokens", 3), ("id", "3")):
        with pytest.raises(ConfigError):
            Request(**{"prompt": [1, 2], "limit": 3, field: value})


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
    for request in (first, *others):
        assert request.tokens == continue_by_recomputing(tiny_model(), request.prompt, request.limit)


def catching_up(kind: str, target: ModelRunner) -> tuple[Drafter, list[int]]:
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
    assert others[0].tokens == continue_by_recomputing(tiny_model(), others[0].prompt, 60)


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
