"""Answers kept by prompt: rows draft by those of their own prompt, within a bound, and no token changes."""

import random
from collections import defaultdict
from itertools import cycle

import pytest

from engine import Decoder, Request, SamplingParams, generate
from engine.drafters import RowUpdate
from engine.drafters.suffix import N_PROMPTS, Suffix
from engine.requests import Progress
from tests.support.tiny import random_prompts, tiny_runner

DRAWS = (7, 3)


def test_rows_draft_by_answers_to_their_own_prompt():
    """Also by one that grows in another row; the tokens that most answers have go first."""
    drafter, prompt, other = Suffix(tiny_runner(4), gamma=3, keep_answers=1000), [1, 2, 3], [1, 2, 4, 3]

    def guesses(row: int, begin: list[int], *tokens: int) -> list[int]:
        n, n_seen = len(begin), len(begin) + len(tokens) - 1 if tokens else 0
        update = RowUpdate(row, row, [*begin, *tokens], n_seen, verified=range(n, n + max(0, len(tokens) - 1)))
        return [*drafter.continued(update).tokens]

    assert guesses(0, prompt) == guesses(1, other) == []
    for i, token in enumerate(answer := [9, 8, 7, 6], start=1):
        guesses(0, prompt, *answer[:i])
        guesses(1, other, *[token + 20 for token in answer[:i]])
    assert guesses(2, prompt) == [9, 8, 7] and guesses(3, other) == [29, 28, 27]
    assert guesses(2, prompt, 9) == [8, 7, 6] and guesses(3, other, 8) == [], "8 is of the other prompt"
    assert guesses(0, prompt, *answer, 5) == [] and guesses(2, prompt, 9, 8) == [7, 6, 5]
    for row in (1, 3):
        for n in range(3):
            guesses(row, prompt, *[9, 4][:n])
    assert guesses(0, prompt) == [9, 4], "of 8 and 4, which follow twice, the latest"
    assert guesses(0, [0, 9, 6, 6, 0, 9]) == [6, 6, 0], "the answers to this prompt have no match"


def test_a_request_does_not_know_what_its_random_numbers_drew_before():
    """Nor does one that has tokens when the drafter meets it: they may be in answers that were dropped."""
    drafter = Suffix(tiny_runner(3), gamma=3, keep_answers=1000)
    first = RowUpdate(0, 3, [1, 2], 0, DRAWS)
    assert not drafter.continued(first).tokens
    drafter.continued(first._replace(tokens=[1, 2, 5, 6], n_seen=2))
    again = RowUpdate(1, 3, [1, 2], 0, DRAWS)
    assert not drafter.continued(again).tokens
    assert not drafter.continued(again._replace(tokens=[1, 2, 8, 7], n_seen=2)).tokens
    later = RowUpdate(2, 4, [1, 2, 5], 0, (8, 3), verified=range(2, 3))
    assert not drafter.continued(later).tokens
    other = RowUpdate(2, 5, [1, 2], 0, (9, 3))
    for update in (other, other._replace(noise_key=None)):
        assert [*drafter.continued(update).tokens] == [5, 6]


@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_kept_stays_within_its_bound(keyed: bool):
    """Three rows of which requests come and go, some before they have a token: few prompts and many, short answers and
    an answer beyond the bound."""
    rng, size, n_guessed = random.Random(4), 60, 0
    drafter = Suffix(tiny_runner(3), gamma=3, keep_answers=size)
    for i, row in zip(range(600), cycle(range(3)), strict=False):
        text, limit = [rng.randrange(3 if i % 100 < 60 else 50), 60], rng.choice([0, 1, 5, 60 if i % 50 == 7 else 3])
        key = (i % 200, 0) if keyed else None
        for n in range(limit + 1):
            update = RowUpdate(row, i, [*text], n and len(text) - 1, key, verified=range(2, 1 + n) if n else range(0))
            n_guessed += bool(drafter.continued(update).tokens)
            text.append(rng.randrange(4))
        tables = {*drafter._kept.values(), *(table for table, _ in drafter._answers.values())}
        assert len(drafter._kept) <= N_PROMPTS and len(tables) <= N_PROMPTS + 3
        assert all(max(len(table._followers), len(table.drawn)) <= size for table in tables)
    assert n_guessed > 100 and len(drafter._kept) == N_PROMPTS


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_samples_of_two_prompts_share_drafts_and_change_no_token(mode: str):
    """Five samples of each, of different lengths, in three rows that keep prefixes; one is cancelled. Then again."""
    runner, prompts = tiny_runner(3), random_prompts([12, 30])
    sampling = SamplingParams(0.2, seed=5) if mode == "coupled" else SamplingParams()
    limits = [24, 9, 30, 17, 24, 30, 12, 28, 30, 20]
    each = [*enumerate(zip([prompts[i % 2] for i in range(10)], limits, strict=True))]
    how = {"sampling": sampling, "verification": mode}
    plain = generate(runner, [prompt for _, (prompt, _) in each], max_new_tokens=limits, **how).tokens
    rounds, proposed, progress = {}, defaultdict[int, set[int]](set), Progress()
    progress.decoded = lambda request, outcome, n_kept: proposed[request.index].update(outcome.drafts)
    for keep_answers in (0, 5000):
        decoder = Decoder(
            runner,
            drafter=Suffix(runner, 3, keep_answers=keep_answers),
            verification=mode,
            progress=progress,
            reuses="prefixes",
            prefill_tokens=8,
        )
        for turn in range(2):
            requests = [Request(*of, (), sampling, i, index=i) for i, of in each]
            for request in requests:
                decoder.submit(request)
            while not decoder.idle:
                decoder.step()
                if len(requests[2].tokens) > 7:
                    decoder.cancel(requests[2])
            assert requests[2].finish_reason == "cancelled"
            for i, request in enumerate(requests):
                assert request.tokens == plain[i][: len(request.tokens) if i == 2 else None]
                of_prompt = {token for other in range(i % 2, 10, 2) for token in plain[other]}
                assert proposed[i] <= of_prompt | {*request.prompt}
            rounds[keep_answers, turn] = sum(request.counts.rounds for request in requests)
    assert rounds[5000, 0] < rounds[0, 0] and rounds[5000, 1] < 0.6 * rounds[0, 1]
