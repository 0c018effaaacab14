"""Drafters without probabilities: what an n-gram lookup proposes, row by row."""

import random

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, generate
from engine.drafters.ngram import NGram, find_ngram
from engine.drafters.oracle import Oracle
from tests.support.tiny import full_cache, tiny_model


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


def test_a_drafter_of_another_runner_is_refused():
    model = tiny_model()
    runner, other = ModelRunner(model, full_cache(model, 2)), ModelRunner(model, full_cache(model, 2))
    for drafter in (NGram(runner, 2), Oracle(runner, {}, 2)):
        with pytest.raises(ConfigError, match="another runner"):
            generate(other, [[1], [2, 3]], max_new_tokens=2, drafter=drafter)
