"""A drafter that returns what cannot be verified is named in an error, and costs no request a token."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, StandaloneDraft
from engine.drafters import Drafter, Guess
from engine.drafters.combined import Combined
from engine.drafters.suffix import Suffix
from engine.modes import Drafts
from tests.support.recorded_graph import RecordedGraphs
from tests.support.tiny import TINY, decode, full_cache, random_prompts, recomputed, tiny_model, tiny_runner

V, GAMMA = TINY.vocab_size, 3


class Careless(StandaloneDraft):
    """Drafts the target's tokens, and then changes its drafts."""

    change: Callable[[Drafts], Any] | None = None

    def propose(self, *given: Any) -> Drafts:
        drafts = super().propose(*given)
        return self.change(drafts) if self.change else drafts


def with_id(drafts: Drafts, token: int, row: int = -1) -> Drafts:
    tokens = drafts.tokens.clone()
    tokens[row, -1] = token
    return drafts._replace(tokens=tokens)


WRONG: dict[str, Callable[[Drafts], Any]] = {
    "no drafts": lambda drafts: drafts.tokens,
    "tokens: float": lambda drafts: drafts._replace(tokens=drafts.tokens.double()),
    "tokens: too many": lambda drafts: drafts._replace(tokens=drafts.tokens.repeat(1, 2)),
    "tokens: one row": lambda drafts: drafts._replace(tokens=drafts.tokens[:1]),
    "tokens: an id below 0": lambda drafts: with_id(drafts, -1),
    "tokens: an id behind the last": lambda drafts: with_id(drafts, V, row=0),
    "lengths: float": lambda drafts: drafts._replace(lengths=torch.ones(2)),
    "lengths: above gamma": lambda drafts: drafts._replace(lengths=torch.tensor([2, GAMMA + 1])),
    "probs: integers": lambda drafts: drafts._replace(probs=torch.ones(2, GAMMA, V, dtype=torch.int64)),
}


def start(make: Callable[[ModelRunner], Drafter], mode: str, **options: Any) -> tuple[Decoder, Drafter, list[Request]]:
    """Start two rows, and a request that waits; return the drafter, too."""
    runner = tiny_runner(2, **options)
    drafter = make(runner)
    decoder, sampling = Decoder(runner, drafter=drafter, verification=mode), SamplingParams(0.8 * (mode != "greedy"))
    requests = [
        Request(p, n, sampling=sampling, id=n) for p, n in zip(random_prompts([5, 23, 9]), (12, 20, 9), strict=True)
    ]
    for request in requests:
        decoder.submit(request)
    return decoder, drafter, requests


def careless(runner: ModelRunner) -> Careless:
    return Careless(ModelRunner(runner.model, full_cache(runner.model, 2)), GAMMA)


def finish(decoder: Decoder, requests: list[Request]) -> None:
    """Decode on; assert that greedy requests have the tokens of plain decoding."""
    decode(decoder)
    assert all(request.finish_reason == "length" for request in requests)
    if requests[0].sampling.greedy:
        prompts, limits = [request.prompt for request in requests], [request.limit for request in requests]
        assert [request.tokens for request in requests] == recomputed(tiny_model(), prompts, limits)


@pytest.mark.parametrize("kind,mode", [*zip(WRONG, cycle(["greedy", "rejection", "coupled"]), strict=False)])
def test_wrong_drafts_are_an_error_that_names_the_drafter(kind, mode):
    """Once the drafter is right again, so is all else."""
    decoder, drafter, requests = start(careless, mode)
    decoder.step()
    emitted = [[*request.tokens] for request in requests]
    drafter.change = WRONG[kind]
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            decoder.step()
        name, _, field = caught.value.where.partition(": ")
        assert name.startswith("Careless.propose") and field == kind.partition(":")[0] * (":" in kind)
        assert [request.tokens for request in requests] == emitted
    drafter.change = None
    finish(decoder, requests)
    assert all(request.counts.acceptance_rate == 1.0 for request in requests)


def test_a_replayed_draft_with_wrong_ids_is_an_error():
    """No Python runs between drafting and verifying."""
    decoder, drafter, requests = start(careless, "greedy", new_graphs=RecordedGraphs)
    added = torch.zeros(2, 1, dtype=torch.int64)
    drafter.change = lambda drafts: drafts._replace(tokens=drafts.tokens + added)
    for _ in range(4):
        decoder.step()
    added[1] = V
    with pytest.raises(ConfigError, match=r"Careless\.propose: tokens"):
        decoder.step()
    added[1] = 0
    finish(decoder, requests)


class Guessing(Suffix):
    tokens: Any = ()

    def continued(self, update: Any) -> Guess:
        guess = self.tokens if isinstance(self.tokens, str) else Guess(self.tokens, 9)
        return guess if update.row else super().continued(update)


@pytest.mark.parametrize("beside_model", [False, True])
@pytest.mark.parametrize("tokens", [[3, V], [-1], [1.5], [1, 2, 3, 4], None, "no guess"], ids=str)
def test_wrong_guesses_are_an_error_that_names_the_text_drafter(tokens, beside_model):
    guessing = []

    def make(runner: ModelRunner) -> Drafter:
        guessing.append(Guessing(runner, GAMMA))
        return Combined(runner, careless(runner), guessing, 1) if beside_model else guessing[0]

    decoder, _, requests = start(make, "greedy")
    decoder.step()
    emitted = [[*request.tokens] for request in requests]
    guessing[0].tokens = tokens
    with pytest.raises(ConfigError, match=r"Guessing\.continued"):
        decoder.step()
    assert [request.tokens for request in requests] == emitted
    guessing[0].tokens = ()
    finish(decoder, requests)
