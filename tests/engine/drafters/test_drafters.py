"""Drafters without probabilities: what an n-gram lookup proposes, row by row."""

import random

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, generate
from engine.controller import PLAIN, RoundChoice
from engine.drafters.ngram import NGram, find_ngram
from engine.drafters.oracle import Oracle
from kv_cache import FullKVCache
from tests.support.controllers import Scripted
from tests.support.tiny import full_cache, random_prompts, tiny_model
from tests.support.witness import WitnessModel


def look_up(text: list[int], gamma: int, max_ngram: int) -> list[int]:
    """The rule in plain words: longest match first, then most tokens after it up to gamma, then the latest."""
    last, best = len(text) - 1, None
    for place in range(last):
        matched = 0
        while matched < min(max_ngram, place + 1) and text[place - matched] == text[last - matched]:
            matched += 1
        available = min(gamma, last - place)
        if matched and (best is None or (matched, available, place) > best):
            best = matched, available, place
    return [] if best is None else text[best[2] + 1 : best[2] + 1 + best[1]]


def test_the_lookup_follows_its_rule_in_ragged_rows():
    rng = random.Random(0)
    n_drafted = set()
    for _ in range(300):
        rows = [[rng.randrange(rng.choice([2, 5, 50])) for _ in range(rng.randint(1, 25))] for _ in range(4)]
        gamma, max_ngram = rng.randint(0, 5), rng.choice([1, 2, 3, 4, 30])
        # What lies behind a row's last token is left over from another text and must not be looked at.
        text = torch.tensor([row + [rng.randrange(5) for _ in range(32 - len(row))] for row in rows])
        lengths = torch.tensor([len(row) - 1 for row in rows])
        # A text may be shorter than the longest match that is looked for.
        width = max(map(len, rows)) + rng.choice([0, 7])
        place, n_tokens = find_ngram(text[:, :width], lengths, gamma, max_ngram)
        for row, at, n in zip(rows, place.tolist(), n_tokens.tolist(), strict=True):
            assert row[at + 1 : at + 1 + n] == look_up(row, gamma, max_ngram)
            n_drafted.add(n)
    assert n_drafted == set(range(6))


def test_ngram_remembers_what_was_accepted_and_forgets_what_was_not():
    """Proposals are those of a lookup in the text that a row's request has so far, round after round."""
    model, prompts = WitnessModel(), random_prompts([9, 3, 30, 12], 4)
    runner = ModelRunner(model, FullKVCache(model.config, 3, 80, dtype=torch.int64))
    drafter, seen = NGram(runner, 4), []
    propose = drafter.propose

    def watched(batch, *how):
        drafts = propose(batch, *how)
        rows = batch.idle, batch.requests, batch.lengths, drafts.lengths, drafts.tokens
        seen.extend(zip(*(each.tolist() for each in rows), strict=True))
        return drafts

    drafter.propose = watched
    # Two plain rounds, now and then.
    controller = Scripted([drafter], [PLAIN, RoundChoice(0, 4), RoundChoice(0, 4), RoundChoice(0, 4), PLAIN])
    out = generate(runner, prompts, max_new_tokens=[12, 60, 45, 10], controller=controller)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    for is_idle, request, length, n, tokens in seen:
        assert is_idle or tokens[:n] == look_up(texts[request][: length + 1], 4, 3)
    assert len({n for is_idle, *_, n, _ in seen if not is_idle}) > 2


def test_a_drafter_of_another_runner_is_refused():
    model = tiny_model()
    runner, other = ModelRunner(model, full_cache(model, 2)), ModelRunner(model, full_cache(model, 2))
    for drafter in (NGram(runner, 2), Oracle(runner, {}, 2)):
        with pytest.raises(ConfigError, match="another runner"):
            generate(other, [[1], [2, 3]], max_new_tokens=2, drafter=drafter)
