"""A decoder whose requests come and go between its steps: each gets the tokens that it gets alone."""

import random

import pytest

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, generate
from engine.controller import PLAIN, Fixed, RoundChoice
from engine.requests import Progress
from kv_cache.streaming import Streaming
from tests.support.controllers import Scripted
from tests.support.drafters import three_drafters
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.scenarios import random_sampling
from tests.support.tiny import continue_by_recomputing, decode, full_cache, random_prompts, self_draft, tiny_model
from tests.support.witness import VOCAB, continue_plainly, cut, witness_runner

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
    future = continue_plainly(request.prompt, request.limit, request.sampling, request.id)
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


@pytest.mark.parametrize("captured", [False, True])
def test_a_request_that_samples_in_a_new_way_disturbs_nobody(captured):
    """In `auto` the first that samples ends greedy verification, and each new filter makes new rounds."""
    model, prompts = tiny_model(), random_prompts([30, 11, 7, 19, 13])
    graphs: list[RecordedGraph] = []
    new_graphs = (lambda device: RecordedGraphs(device, graphs)) if captured else None
    runner = ModelRunner(model, full_cache(model, 2), new_graphs=new_graphs)
    samplings = [SamplingParams(), WARM, SamplingParams(0.9, top_p=0.7, seed=4), SamplingParams(1.1, seed=5)]
    samplings.append(SamplingParams())
    controller = Fixed(self_draft(runner, Streaming(12, n_sink=2), 3))
    alone = [
        generate(runner, [prompt], max_new_tokens=24, controller=controller, sampling=sampling, request_ids=[i]).tokens[
            0
        ]
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    decoder, requests = Decoder(runner, controller), []
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


def test_a_request_that_was_submitted_or_has_other_types_is_refused():
    decoder, request = Decoder(witness_runner(2)), Request([5, 1, 7], 4)
    decoder.submit(request)
    with pytest.raises(ConfigError):
        Decoder(witness_runner(2)).submit(request)
    for field, value in (("prompt", [1, 2.0]), ("stop_tokens", 3), ("id", "3")):
        with pytest.raises(ConfigError):
            Request(**{"prompt": [1, 2], "limit": 3, field: value})
