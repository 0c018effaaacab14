"""Steps that exceptions interrupt: no request gets a wrong token or is forgotten, and the decoder goes on."""

import os
import random
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from types import FrameType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from engine import Decoder, ModelRunner, Request
from engine.parallel.ranks import Ranks
from kv_cache import FullKVCache
from tests.support.drafters import GUESSES
from tests.support.recorded_graph import RecordedGraphs
from tests.support.scenarios import DRAFTERS, REFERENCED, LlamaWorld, Scenario, WitnessWorld, World
from tests.support.tiny import decode, random_prompts, recomputed, tiny_runner
from tests.support.witness import cut

INTERRUPTIONS = int(os.environ.get("INTERRUPTIONS", "24"))
ERRORS = KeyboardInterrupt, MemoryError, RuntimeError
REUSES = "prefixes", "prompts", "nothing"
WATCHED = "engine.", "kv_cache.", "models.llama", "tests.support.witness"
# Their drafts depend on a row's text alone: in rejection mode a round that runs again draws the same tokens.
BY_TEXT = (*REFERENCED, "ngram", "markov", *GUESSES)
RECOVERIES = "Decoder._recover", "Rows.forget_free", "ModelRunner.drop_graphs"
RECOVERY = [f"{event} {name}" for event in ("call", "return") for name in RECOVERIES]

Point = tuple[str, int]  # "call" or "return" and a function, or "" for an instruction; and which of them


class Interruptions:
    """Counts calls and returns of the engine's functions in steps, or its instructions, and raises where it is due.

    n_adding: how often it raised while a request took tokens, which then ends with an error.
    """

    def __init__(self, due: Iterable[Point] = (), at_instructions: bool = False) -> None:
        self.counts, self.due, self.n_raised, self.n_adding = Counter[str](), {*due}, 0, 0
        self._at_instructions = at_instructions
        self._watched = (*WATCHED, "contextlib") if at_instructions else WATCHED

    def step(self, decoder: Decoder) -> None:
        recover = Decoder._recover

        def recover_traced(decoder: Decoder) -> None:
            sys.settrace(self._trace)  # which ended with the exception
            recover(decoder)

        with patch.object(Decoder, "_recover", recover_traced), suppress(*ERRORS):
            sys.settrace(self._trace)
            try:
                decoder.step()
            finally:
                sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self._watched):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, self._at_instructions
        if event in (("opcode",) if self._at_instructions else ("call", "return")):
            point = "" if self._at_instructions else f"{event} {frame.f_code.co_qualname}"
            self.counts[point] += 1
            if (point, self.counts[point]) in self.due:
                self._raise(frame)
        return self._trace

    def _raise(self, frame: FrameType | None) -> None:
        self.n_raised += 1
        names = set[str]()
        while frame:
            names.add(frame.f_code.co_qualname)
            frame = frame.f_back
        self.n_adding += self._at_instructions or not names.isdisjoint(("Request.emit", "Request.commit"))
        raise ERRORS[self.n_raised % len(ERRORS)]


class Case:
    """A scenario's requests, some of them in a group, and a decoder of them; equal for equal seeds."""

    def __init__(self, world: World, seed: int, drafters: tuple[str, ...]) -> None:
        self._world, self._rng = world, random.Random(seed)
        scenario = Scenario.random(self._rng, world.model.config.vocab_size, drafters)
        drafter = drafters[seed % len(drafters)]
        is_repeatable = scenario.mode != "rejection" or drafter in BY_TEXT
        self.scenario = replace(scenario, mode=scenario.mode if is_repeatable else "coupled", drafter=drafter)
        rejects = self.scenario.mode == "rejection"
        self._futures, self._reuses = self.scenario.futures(world), REUSES[seed % 3]
        # A backlog of a drafter makes rounds plain, which draw other tokens in rejection mode.
        self._n_rows, self._chunk = self._rng.choice([2, 3]), None if rejects else self._rng.choice([2, 5, None])
        self._captured = world.model.dtype.is_floating_point and seed % 2 == 0
        each = zip(self._futures, self.scenario.limits, self.scenario.stops, strict=True)
        self._expected = [cut(future[:limit], stops) for future, limit, stops in each]
        if rejects and drafter not in REFERENCED:
            self._expected = []
            self._expected = [request.tokens for request in self.run(Interruptions())[: len(self._futures)]]

    def run(self, interruptions: Interruptions) -> list[Request]:
        """Decode all requests, and check them after each step."""
        decoder, requests = self._start()
        for _ in range(500):
            interruptions.step(decoder)
            if decoder._is_torn:  # the next step makes up for a recovery that was interrupted
                continue
            if self._expected:
                for request in requests:
                    check(request, self._expected[request.index])
            check_prefixes(decoder._runner.cache)
            if decoder.idle:
                break
        assert decoder.idle
        for request in requests:
            assert request.finish_reason is not None, "a request was forgotten"
            # A draft that sees what the target sees is the target, except for edits by tokens of its round.
            if self.scenario.drafter.endswith("full") and not request.sampling.edits and not request.error:
                assert request.counts.acceptance_rate in (None, 1.0)
        return requests

    def _start(self) -> tuple[Decoder, list[Request]]:
        """Return a decoder, and its requests in the order of the scenario, some twice."""
        scenario, world = self.scenario, self._world
        cache = FullKVCache(world.model.config, self._n_rows, scenario.n_slots() + 5, dtype=world.kv_dtype)
        new_graphs = RecordedGraphs if self._captured else None
        runner = ModelRunner(world.model, cache, scenario.prefill_chunk, new_graphs=new_graphs)
        drafting = scenario.drafting(world, runner, self._futures)
        how = {"prefill_tokens": self._chunk, "reuses": self._reuses, "verification": scenario.mode}
        each = zip(scenario.prompts, scenario.limits, scenario.stops, scenario.samplings, scenario.ids, strict=True)
        given = [(*fields, index) for index, fields in enumerate(each)]
        requests = [Request(*fields, logprobs=[], group=fields[-1]) for fields in (*given, *given[:3])]
        requests[-1].prompt_logprobs = []
        decoder = Decoder(runner, **drafting, **how)
        for request in random.Random(len(given)).sample(requests, len(requests)):
            decoder.submit(request)
        return decoder, requests


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


# Worlds, how many runs a case has in each, and in how many batches its cases are tested.
WORLDS = {"witness": (WitnessWorld, 4, 8), "Llama": (partial(LlamaWorld, "grouped heads"), 2, 2)}


@pytest.mark.parametrize("world,batch", [(name, i) for name, (*_, n_batch) in WORLDS.items() for i in range(n_batch)])
def test_an_exception_in_any_call_corrupts_no_request(world, batch):
    """A case runs without interruptions, then with several: at two calls or returns of a function, at those of others,
    and in recoveries."""
    new_world, n_runs, n_batch = WORLDS[world]
    made = new_world()
    for seed in range(batch, INTERRUPTIONS * n_batch // 8 // 4, n_batch):
        case, rng = Case(made, seed, made.drafters or DRAFTERS), random.Random(seed)
        case.run(counted := Interruptions())
        points = rng.sample(sorted(counted.counts), len(counted.counts))
        for point in islice(cycle(points), n_runs):
            at = rng.randint(1, counted.counts[point])
            due = [(point, at), (point, at + 1)]
            due += [(rng.choice(RECOVERY), n) for n in (1, 2, 3)]
            due += [(other, rng.randint(1, counted.counts[other])) for other in rng.sample(points, 3)]
            requests = case.run(interruptions := Interruptions(due))
            n_ended = sum(request.error is not None for request in requests)
            assert interruptions.n_raised and n_ended <= interruptions.n_adding


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ctrl_c_between_any_two_instructions_corrupts_no_request(seed):
    case, rng = Case(WitnessWorld(), seed, DRAFTERS), random.Random(seed)
    case.run(counted := Interruptions(at_instructions=True))
    for _ in range(INTERRUPTIONS // 4):
        requests = case.run(Interruptions([("", rng.randint(1, counted.counts[""]))], at_instructions=True))
        assert sum(request.error is not None for request in requests) <= 1


def test_with_other_ranks_all_requests_end(monkeypatch):
    """They have not run what this rank would run again. Dropping graphs waits for the GPU, and so for them."""
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


def test_a_copied_prompt_is_reused_only_if_nothing_was_written_into_it():
    """An interrupted copy leaves a row that idles within the prompt, where an interrupted round writes."""
    (prompt,), short = random_prompts([30]), [3, 4]
    runner = tiny_runner(2)
    decoder = Decoder(runner, reuses="prefixes")
    long, brief, copied = Request(prompt, 20, group=1), Request(short, 2), Request(prompt, 20, group=1)
    decoder.submit(long), decoder.submit(brief)
    decoder.step()
    assert brief.finish_reason == "length"
    decoder.submit(copied)
    for point in ("return ModelRunner.copy_prompt", "return Round.accept"):
        Interruptions([(point, 1)]).step(decoder)
        decoder.cancel(copied)
    decode(decoder, again := Request(prompt, 20))
    assert long.tokens == again.tokens == recomputed(runner.model, [prompt], 20)[0]
