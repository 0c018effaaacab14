"""A decoder whose requests come and go between its steps: each gets the tokens that it gets alone."""

import random

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.drafters.ngram import NGram
from engine.pacing import PLAIN, Choice, Fixed
from engine.requests import Progress
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.streaming import Streaming
from tests.support.pacings import Scripted
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.scenarios import random_sampling
from tests.support.tiny import continue_by_recomputing, decode, full_cache, random_prompts, self_draft, tiny_model
from tests.support.witness import VOCAB, WitnessModel, continue_plainly, cut

ROOM, GAMMA = 64, 3
SCRIPT = (PLAIN, Choice(0, 3), Choice(1, 2), Choice(1, 3), Choice(2, 3), PLAIN, Choice(0, 1))
WARM = SamplingParams(1.5, top_k=20, seed=3)


def witness_runner(n_rows: int) -> ModelRunner:
    model = WitnessModel()
    return ModelRunner(model, FullKVCache(model.config, n_rows, ROOM, dtype=torch.int64), prefill_chunk=5)


def drafters_of(runner: ModelRunner) -> list:
    """A drafter that is written through, one that runs a model, and one that copies text."""
    model, n_rows, dtype = runner.model, runner.max_batch, runner.cache.keys.dtype
    own = FullKVCache(model.config, n_rows, ROOM, dtype=dtype)
    return [
        SelfSpeculation(runner, StreamingKVCache(model.config, n_rows, 8, 1, dtype=dtype), GAMMA),
        StandaloneDraft(ModelRunner(model, own), GAMMA),
        NGram(runner, GAMMA),
    ]


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
    future = continue_plainly(request.prompt, request.limit, request.sampling, request.id)
    return cut(future, list(request.stop_tokens))


def drive(decoder: Decoder, requests: list[Request], rng: random.Random) -> set[Request]:
    """Submit them one by one between steps, and cancel some whatever they do; returns those cancelled in time."""
    waiting, submitted, cancelled = list(requests), [], set()
    while waiting or not decoder.idle:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                submitted.append(waiting.pop(0))
                decoder.submit(submitted[-1])
        if submitted and rng.random() < 0.15:
            one = rng.choice(submitted)
            if one.finish_reason is None:
                cancelled.add(one)
            decoder.cancel(one)
        decoder.step()
    return cancelled


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("seed", range(16))
def test_each_request_gets_what_it_gets_alone(seed, mode):
    """Rows of any kind join and leave, in chunks or at once, behind what rows hold or not; drafters change from round
    to round, and meet requests late or never."""
    rng = random.Random(f"{seed} {mode}")
    runner, reuses = witness_runner(rng.randint(1, 4)), seed % 2 == 1
    requests, pacing = random_requests(rng, mode), Scripted(drafters_of(runner), SCRIPT)
    how = {"prefill_tokens": rng.choice([1, 3, 7, None]), "reuses": "prefixes" if reuses else "prompts"}
    decoder = Decoder(runner, pacing, verification=mode, **how)
    cancelled = drive(decoder, requests, rng)
    for request in requests:
        if request in cancelled:
            assert request.finish_reason == "cancelled" and request.tokens == expected(request)[: len(request.tokens)]
        else:
            assert request.tokens == expected(request) and request.finish_reason in ("length", "stop")
        assert len(request.tokens) == request.counts.emitted + bool(request.tokens)
        assert 0 <= request.n_reused <= len(request.prompt)
    assert decoder.step() is None and (not reuses or any(request.n_reused > 1 for request in requests))


@pytest.mark.parametrize("captured", [False, True])
def test_a_request_that_samples_in_a_new_way_disturbs_nobody(captured):
    """In `auto` the first that samples ends greedy verification, and each new filter makes new rounds."""
    model, prompts = tiny_model(), random_prompts([30, 11, 7, 19, 13])
    graphs: list[RecordedGraph] = []
    new_graphs = (lambda device: RecordedGraphs(device, graphs)) if captured else None
    runner = ModelRunner(model, full_cache(model, 2), new_graphs=new_graphs)
    samplings = [SamplingParams(), WARM, SamplingParams(0.9, top_p=0.7, seed=4), SamplingParams(1.1, seed=5)]
    samplings.append(SamplingParams())
    pacing = Fixed(self_draft(runner, Streaming(12, n_sink=2), GAMMA))
    alone = [
        generate(runner, [prompt], max_new_tokens=24, pacing=pacing, sampling=sampling, request_ids=[i]).tokens[0]
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    decoder, requests = Decoder(runner, pacing), []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        requests.append(Request(prompt, 24, sampling=sampling, id=i))
        decoder.submit(requests[-1])
        for _ in range(4):
            decoder.step()
    decode(decoder)
    assert [request.tokens for request in requests] == alone
    assert alone[0] == continue_by_recomputing(model, prompts[0], 24)
    assert bool(graphs) is captured


@pytest.mark.parametrize("captured", [False, True])
def test_a_round_computes_the_rows_that_decode(captured):
    """Five rows end one by one; captured rounds are made for 1, 2, 4 and all, called ones for 2 or more."""
    computed = []

    class Counting(ModelRunner):
        def step(self, tokens, positions, cache=None):
            computed.append(len(tokens))
            return super().step(tokens, positions, cache)

    model = tiny_model()
    decoder = Decoder(Counting(model, full_cache(model, 5), new_graphs=RecordedGraphs if captured else None))
    requests = [Request(prompt, 3 + n) for n, prompt in enumerate(random_prompts([9, 4, 17, 6, 11]))]
    for request in requests:
        decoder.submit(request)
    busy = [step.busy for step in iter(decoder.step, None)]
    assert busy == [5, 5, 4, 3, 2, 1]
    # The second of a kind is called once more, to compare what its graph gives.
    assert computed == ([5, 5, 5, 4, 4, 4, 2, 1] if captured else [5, 5, 4, 3, 2, 2])
    assert all(one.tokens == continue_by_recomputing(model, one.prompt, one.limit) for one in requests)


def test_a_cancelled_row_is_free_before_the_next_round():
    runner = witness_runner(2)
    decoder = Decoder(runner)
    first, second, third, fourth = (Request([5, n, 7], 9) for n in range(4))
    for request in (first, second, third, fourth):
        decoder.submit(request)
    assert decoder.step().busy == 2
    decoder.cancel(third)  # it waits, and never starts
    decoder.cancel(first)
    assert first.tokens == continue_plainly(first.prompt, 2) and decoder.step().busy == 2
    assert (first.finish_reason, third.finish_reason) == ("cancelled", "cancelled")
    assert len(fourth.tokens) == 2 and not third.tokens
    decoder.cancel(fourth)
    decoder.cancel(fourth)
    assert decoder.step().busy == 1 and len(fourth.tokens) == 2
    decode(decoder)
    decoder.cancel(second)
    assert second.finish_reason == "length" and second.tokens == continue_plainly(second.prompt, 9)


def test_a_row_that_is_cancelled_when_another_ends_emits_no_more():
    """By who is notified of that end, in the middle of a round that has tokens for both."""
    first, second = Request([5, 1, 7], 3), Request([5, 2, 7], 9)

    class Cancelling(Progress):
        def finished(self, request):
            ended.append(request)
            decoder.cancel(second)

    ended: list[Request] = []
    decoder = Decoder(witness_runner(2), progress=Cancelling())
    decode(decoder, first, second)
    assert ended == [first] and second.finish_reason == "cancelled" and second.tokens == continue_plainly([5, 2, 7], 2)


def test_a_request_that_is_cancelled_at_its_first_token_leaves_its_row():
    class Cancelling(Progress):
        def emitted(self, n_tokens):
            decoder.cancel(first)

        def finished(self, request):
            assert request is second

    first, second = Request([5, 1, 7], 3), Request([5, 2, 7], 3)
    decoder = Decoder(witness_runner(1), progress=Cancelling())
    decode(decoder, first, second)
    assert (first.finish_reason, len(first.tokens)) == ("cancelled", 1) and decoder.idle
    assert second.tokens == continue_plainly([5, 2, 7], 3)


def test_a_request_that_was_submitted_or_has_other_types_is_refused():
    decoder, request = Decoder(witness_runner(2)), Request([5, 1, 7], 4)
    decoder.submit(request)
    with pytest.raises(ConfigError):
        Decoder(witness_runner(2)).submit(request)
    for field, value in (("prompt", [1, 2.0]), ("stop_tokens", 3), ("id", "3")):
        with pytest.raises(ConfigError):
            Request(**{"prompt": [1, 2], "limit": 3, field: value})


def test_a_request_takes_numbers_of_numpy():
    prompts, limits, stops = [np.array([5, 1, 7]), [np.int32(5), np.uint8(2)]], np.array([9, 4]), [np.int64(VOCAB - 1)]
    out = generate(witness_runner(2), prompts, max_new_tokens=limits, stop_tokens=stops, request_ids=np.arange(2))
    plain = [continue_plainly([5, 1, 7], 9), continue_plainly([5, 2], 4)]
    assert out.tokens == [cut(tokens, [VOCAB - 1]) for tokens in plain]
    assert Request(torch.tensor([5, 1]), 3).prompt == [5, 1]
