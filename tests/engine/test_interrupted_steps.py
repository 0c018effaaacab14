"""Steps that exceptions interrupt: no request gets a wrong token or is forgotten, and the decoder goes on."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from itertools import cycle, islice
from types import FrameType, FunctionType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from engine import Decoder, ModelRunner, Request, StandaloneDraft
from engine.drafters.ngram import NGram
from engine.parallel.ranks import Ranks
from engine.requests import Progress
from engine.round import Round
from kv_cache import FullKVCache
from tests.engine.test_llama_scenarios import LlamaWorld
from tests.engine.test_witness import WitnessWorld
from tests.support.recorded_graph import RecordedGraphs
from tests.support.scenarios import DRAFTERS, PACED, Scenario, World
from tests.support.tiny import decode, full_cache, random_prompts, recomputed, tiny_runner
from tests.support.witness import cut

INTERRUPTIONS = int(os.environ.get("INTERRUPTIONS", "24"))
ERRORS = KeyboardInterrupt, MemoryError, RuntimeError
REUSES = "prefixes", "prompts", "nothing"
PACKAGES = "engine.", "kv_cache.", "models.llama", "witness"
# Tokens are added to a request here.
ADDS = "Request.emit", "Request.commit", "Counts.add_round"


class Interruptions:
    """Counts the calls of every method below PACKAGES during steps, and raises in the calls that are due.

    due: by the method's name and the number of its call, True to raise behind the call, False to raise before it.
    """

    def __init__(self) -> None:
        self.calls, self.due, self.raised = Counter[str](), dict[tuple[str, int], bool](), list[str]()
        self._in_step = False

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args, **kwargs):
            if not self._in_step:
                return method(*args, **kwargs)
            self.calls[name] += 1
            behind = self.due.get((name, self.calls[name]))
            if behind is False:
                self._interrupt(name)
            result = method(*args, **kwargs)
            if behind:
                self._interrupt(name)
            return result

        return call

    def _interrupt(self, name: str) -> None:
        self.raised.append(name)
        raise ERRORS[len(name) % len(ERRORS)](name)

    @contextmanager
    def watch(self) -> Iterator[None]:
        modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGES)]
        classes = {thing for module in modules for thing in vars(module).values() if isinstance(thing, type)}
        with ExitStack() as stack:
            for made in classes:
                for name, method in [*vars(made).items()] if made.__module__.startswith(PACKAGES) else ():
                    is_step = made is Decoder and name == "step"
                    if isinstance(method, FunctionType) and not name.startswith("__") and not is_step:
                        watched = self._watched(f"{made.__name__}.{name}", method)
                        stack.enter_context(patch.object(made, name, watched))
            yield

    def step(self, decoder: Decoder) -> None:
        self._in_step = True
        try:
            decoder.step()
        except ERRORS:
            pass
        finally:
            self._in_step = False


class Instructions(Interruptions):
    """Counts the bytecode instructions of PACKAGES in steps, and raises KeyboardInterrupt before one of them, `at`."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.n, self._at = 0, at

    @contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def step(self, decoder: Decoder) -> None:
        sys.settrace(self._enter if self.n < self._at or not self._at else None)
        try:
            decoder.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith((*PACKAGES, "contextlib")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.n += 1
            if self.n == self._at:
                raise KeyboardInterrupt
        return self._count


class Case:
    """A scenario's requests, some of them in a group, and a decoder of them; equal for equal seeds."""

    def __init__(self, world: World, seed: int, drafters: tuple[str, ...]) -> None:
        self._world, self._rng = world, random.Random(seed)
        scenario = Scenario.random(self._rng, world.model.config.vocab_size, drafters)
        mode = "greedy" if scenario.mode == "greedy" else "coupled"
        self.scenario = replace(scenario, mode=mode, drafter=drafters[seed % len(drafters)])
        self._futures, self._reuses = self.scenario.futures(world), REUSES[seed % 3]
        self._n_rows, self._chunk = self._rng.choice([2, 3]), self._rng.choice([2, 5, None])
        self._captured = world.model.dtype.is_floating_point and seed % 2 == 0

    def run(self, interruptions: Interruptions) -> list[Request]:
        """Decode all requests, and check them whenever a step has ended."""
        (decoder, requests), expected = self._start(), {}
        for request in requests:
            future = self._futures[request.index]
            expected[request] = cut(future[: request.limit], [*request.stop_tokens])
            decoder.submit(request)
        with interruptions.watch():
            for _ in range(500):
                interruptions.step(decoder)
                if decoder._is_torn:  # the next step makes up for a recovery that was interrupted
                    continue
                for request in requests:
                    check(request, expected[request])
                check_prefixes(decoder._runner.cache)
                if decoder.idle:
                    break
        assert decoder.idle
        for request in requests:
            assert request.finish_reason is not None, "a request was forgotten"
            assert request.error or request.tokens == expected[request]
            # A draft that sees what the target sees is the target, except for edits by tokens of its round.
            if self.scenario.drafter.endswith("full") and not request.sampling.edits and not request.error:
                assert request.counts.acceptance_rate in (None, 1.0)
        return requests

    def _start(self) -> tuple[Decoder, list[Request]]:
        scenario, world, rng = self.scenario, self._world, random.Random(len(self._futures))
        prompts, n_rows = [*scenario.prompts], self._n_rows
        room = max(len(p) + n for p, n in zip(prompts, scenario.limits, strict=True)) + scenario.gamma + 1 + 5
        cache = FullKVCache(world.model.config, n_rows, room, dtype=world.kv_dtype)
        new_graphs = RecordedGraphs if self._captured else None
        runner = ModelRunner(world.model, cache, scenario.prefill_chunk, new_graphs=new_graphs)
        paced = scenario.drafter == PACED
        pacing = scenario._random_pacing(world, runner, room, self._futures) if paced else None
        if pacing:
            pacing.observe = lambda *_: None  # it expects the choice that it made, and a backlog makes rounds plain
        drafter = None if paced else scenario._scheduled(scenario.drafter, runner, room, self._futures)
        how = {"prefill_tokens": self._chunk, "reuses": self._reuses, "verification": scenario.mode}
        each = [*zip(prompts, scenario.limits, scenario.stops, scenario.samplings, scenario.ids, strict=True)]
        made = [Request(*given, index, logprobs=[], group=index) for index, given in enumerate(each)]
        again = [Request(*given, index, logprobs=[], group=index) for index, given in enumerate(each[:3])]
        again[0].prompt_logprobs = []
        requests = [*made, *again]
        rng.shuffle(requests)
        return Decoder(runner, pacing, drafter=drafter, **how), requests


def check(request: Request, expected: list[int]) -> None:
    """Assert that a request is as it is between two steps, with right tokens, or has ended with an error."""
    if request.error is not None:
        assert request.finish_reason == "error"
        return
    tokens, n = request.tokens, len(request.tokens)
    assert tokens == expected[:n] and request.text == [*request.prompt, *tokens]
    assert len(request.logprobs) == n == request.counts.emitted + bool(n)
    assert (request.finish_reason is None) == (n < len(expected))
    assert not n or request.prompt_logprobs is None or len(request.prompt_logprobs) == len(request.prompt) - 1


def check_prefixes(cache: FullKVCache) -> None:
    """Assert that rows have entries of the texts that they are known by; those of a witness are the tokens."""
    for row, known in cache.prefilled.items() if not cache.keys.is_floating_point() else ():
        text = torch.tensor([*known.prompt, *known.answer])
        is_there = cache.positions[row, : len(text)] == torch.arange(len(text))
        assert (cache.keys[0, row, 0, : len(text), 0] == text)[is_there].all()


def interrupt(world: World, seed: int, drafters: tuple[str, ...], n_runs: int) -> None:
    """Decode a case without interruptions, then `n_runs` times with several: before or behind two calls of a method,
    at calls of other methods, and in recoveries."""
    case, rng = Case(world, seed, drafters), random.Random(seed)
    case.run(counted := Interruptions())
    assert not counted.raised
    methods = rng.sample(sorted(counted.calls), len(counted.calls))
    for name in islice(cycle(methods), n_runs):
        interruptions, at = Interruptions(), rng.randint(1, counted.calls[name])
        interruptions.due = {(name, at): rng.random() < 0.5, (name, at + 1): True}
        for recovers in ("Decoder._recover", "Rows.forget_free", "ModelRunner.drop_graphs"):
            interruptions.due |= {(recovers, n): rng.random() < 0.5 for n in (1, 2, 3) if rng.random() < 0.3}
        for other in rng.sample(methods, 3):
            interruptions.due[other, rng.randint(1, counted.calls[other])] = rng.random() < 0.5
        requests = case.run(interruptions)
        ended = [request for request in requests if request.error is not None]
        assert interruptions.raised and len(ended) <= sum(each in ADDS for each in interruptions.raised)


@pytest.mark.parametrize("batch", range(8))
def test_an_exception_in_any_call_corrupts_no_request(batch):
    for seed in range(batch, INTERRUPTIONS // 4, 8):
        interrupt(WitnessWorld(), seed, DRAFTERS, 4)


@pytest.mark.parametrize("batch", range(2))
def test_an_exception_in_any_call_corrupts_no_request_of_a_llama(batch):
    world = LlamaWorld("grouped heads")
    for seed in range(batch, INTERRUPTIONS // 16, 2):
        interrupt(world, seed, world.drafters, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ctrl_c_between_any_two_instructions_corrupts_no_request(seed):
    case, rng, counted = Case(WitnessWorld(), seed, DRAFTERS), random.Random(seed), Instructions()
    case.run(counted)
    for _ in range(INTERRUPTIONS // 4):
        requests = case.run(Instructions(at=rng.randint(1, counted.n)))
        assert sum(request.error is not None for request in requests) <= 1


@pytest.mark.parametrize("reuses", REUSES)
def test_a_prefill_that_is_interrupted_begins_anew(reuses, monkeypatch):
    """In its second chunk, while another row decodes: that goes on, and drafts what it drafts without the exception."""
    prompts, limits = random_prompts([5, 23, 11]), [30, 8, 9]
    runner = tiny_runner(2, prefill_chunk=4)
    perfect = StandaloneDraft(ModelRunner(runner.model, full_cache(runner.model, 2)), gamma=3)
    decoder = Decoder(runner, drafter=perfect, prefill_tokens=8, reuses=reuses)
    requests = [Request(prompt, limit, prompt_logprobs=[]) for prompt, limit in zip(prompts, limits, strict=True)]
    for request in requests:
        decoder.submit(request)
    while not requests[1].prompt_logprobs:
        decoder.step()
    n_emitted = len(requests[0].tokens)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(runner.model, "hidden", Mock(side_effect=KeyboardInterrupt))
        decoder.step()
    assert [len(request.tokens) for request in requests] == [n_emitted, 0, 0] and n_emitted
    decode(decoder)
    assert [request.tokens for request in requests] == recomputed(runner.model, prompts, limits)
    assert [len(request.prompt_logprobs or ()) for request in requests] == [4, 22, 10]
    assert all(request.counts.acceptance_rate == 1.0 for request in requests)


def test_callbacks_that_raise_cost_no_token():
    """Each of them, at each of its calls, where rows end in different rounds."""

    class Raising(Progress):
        def __getattribute__(self, name):
            if name.startswith("_"):
                return super().__getattribute__(name)
            calls[name] += 1
            if calls[name] % 2:
                raise RuntimeError(name)
            return super().__getattribute__(name)

    calls: Counter[str] = Counter()
    prompts, limits = random_prompts([5, 23, 11]), [12, 8, 1]
    runner = tiny_runner(2)
    decoder = Decoder(runner, drafter=NGram(runner, 3), progress=Raising())
    requests = [Request(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    for request in requests:
        decoder.submit(request)
    while not decoder.idle:
        with suppress(RuntimeError):
            decoder.step()
    assert [request.tokens for request in requests] == recomputed(runner.model, prompts, limits)
    assert [request.finish_reason for request in requests] == ["length"] * 3 and len(calls) == 5


def test_a_request_that_could_not_take_its_tokens_ends_alone():
    """What its grammar has consumed cannot be taken back."""
    prompts = random_prompts([5, 23, 11])
    runner = tiny_runner(2)
    decoder = Decoder(runner, drafter=NGram(runner, 3))
    requests = [Request(prompt, 12) for prompt in prompts]
    for request in requests:
        decoder.submit(request)
    decoder.step()
    requests[0].commit = Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError):
        decoder.step()
    assert requests[0].finish_reason == "error" and requests[0].error and requests[1].finish_reason is None
    decode(decoder)
    assert [request.tokens for request in requests[1:]] == recomputed(runner.model, prompts, 12)[1:]


def test_beside_other_ranks_all_requests_end(monkeypatch):
    """Since these have not run what this rank would run again. Dropping graphs waits for the GPU, and so for them."""
    runner = tiny_runner(2, ranks=Ranks(size=2))
    monkeypatch.setattr(runner.model, "hidden", Mock(side_effect=MemoryError))
    monkeypatch.setattr(ModelRunner, "drop_graphs", drop_graphs := Mock())
    decoder, requests = Decoder(runner), [Request([5, n], 9) for n in range(3)]
    for request in requests:
        decoder.submit(request)
    with pytest.raises(MemoryError):
        decoder.step()
    assert decoder.idle and not drop_graphs.called
    assert decoder.step() is None and drop_graphs.called
    assert all(request.finish_reason == "error" and request.error for request in requests)


def raising_behind(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> None:
        method(*given)
        raise MemoryError

    return call


def test_a_copied_prompt_is_reused_only_if_nothing_was_written_into_it(monkeypatch):
    """An interrupted copy leaves a row that idles within the prompt, where an interrupted round writes."""
    (prompt,), short = random_prompts([30]), [3, 4]
    runner = tiny_runner(2)
    decoder = Decoder(runner, reuses="prefixes")
    long, brief, copied = Request(prompt, 20, group=1), Request(short, 2), Request(prompt, 20, group=1)
    for request in (long, brief):
        decoder.submit(request)
    decoder.step()
    assert brief.finish_reason == "length"
    decoder.submit(copied)
    for owner, name in ((ModelRunner, "copy_prompt"), (Round, "accept")):
        with monkeypatch.context() as broken, pytest.raises(MemoryError):
            broken.setattr(owner, name, raising_behind(getattr(owner, name)))
            decoder.step()
        decoder.cancel(copied)
    again = Request(prompt, 20)
    decode(decoder, again)
    assert long.tokens == again.tokens == recomputed(runner.model, [prompt], 20)[0]
