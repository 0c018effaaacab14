"""Steps that exceptions interrupt: no request gets a wrong token or is forgotten, and the decoder goes on."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import cycle, islice
from types import FrameType, FunctionType
from typing import Any
from unittest.mock import patch

import pytest
from pacings import scheduled
from recorded_graph import RecordedGraphs
from scenarios import DRAFTERS, PACED, Scenario, World
from test_llama_scenarios import LlamaWorld
from test_witness import WitnessWorld
from tiny import decode, full_cache, random_prompts, recomputed, tiny_runner
from witness import VOCAB, cut

from engine import Decoder, ModelRunner, Request, SelfSpeculation, StandaloneDraft
from engine.requests import Progress
from kv_cache import FullKVCache

INTERRUPTIONS = int(os.environ.get("INTERRUPTIONS", "120"))
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
                for request in requests:
                    check(request, expected[request])
                if decoder.idle:
                    break
        assert decoder.idle
        for request in requests:
            assert request.finish_reason is not None, "a request was forgotten"
            assert request.error or request.tokens == expected[request]
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


def interrupt(world: World, seed: int, drafters: tuple[str, ...], n_runs: int) -> None:
    """Decode a case without interruptions, then `n_runs` times with two: at a call of each of some methods, before it or
    behind it, and in the calls that follow, which may be those of the recovery."""
    case, rng = Case(world, seed, drafters), random.Random(seed)
    case.run(counted := Interruptions())
    assert not counted.raised
    methods = rng.sample(sorted(counted.calls), len(counted.calls))
    for name in islice(cycle(methods), n_runs):
        interruptions, at = Interruptions(), rng.randint(1, counted.calls[name])
        interruptions.due = {(name, at): rng.random() < 0.5, (name, at + 1): True}
        for other in rng.sample(methods, 3):
            interruptions.due[other, rng.randint(1, counted.calls[other])] = rng.random() < 0.5
        requests = case.run(interruptions)
        ended = [request for request in requests if request.error is not None]
        assert interruptions.raised and len(ended) <= sum(each in ADDS for each in interruptions.raised)


@pytest.mark.parametrize("batch", range(8))
def test_an_exception_in_any_call_corrupts_no_request(batch):
    for seed in range(batch, INTERRUPTIONS // 5, 8):
        interrupt(WitnessWorld(), seed, DRAFTERS, 5)


@pytest.mark.parametrize("batch", range(4))
def test_an_exception_in_any_call_corrupts_no_request_of_a_llama(batch):
    world = LlamaWorld("grouped heads")
    for seed in range(batch, INTERRUPTIONS // 10, 4):
        interrupt(world, seed, world.drafters, 3)
