"""Drafters that look text up on the host: what they guess, what they keep, and what they must not know."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from common.errors import ConfigError, DataError
from engine import ModelRunner, SamplingParams, StandaloneDraft, generate
from engine.controller import PLAIN as PLAIN_STEP
from engine.controller import RoundChoice
from engine.drafters import Guess, HostDrafter, RowUpdate
from engine.drafters.combined import Combined
from engine.drafters.ngram import NGram, find_ngram
from engine.drafters.ngram_table import NGramTable
from engine.drafters.oracle import Oracle
from engine.drafters.suffix import N_PROMPTS, Suffix, SuffixAutomaton
from kv_cache import FullKVCache
from kv_cache.streaming import Streaming
from tests.support import table_law as law
from tests.support.controllers import Scripted
from tests.support.drafters import counted
from tests.support.tiny import full_cache, random_prompts, self_draft, tiny_model, tiny_runner


def longest_repeated(text: list[int]) -> tuple[int, int]:
    for length in range(len(text) - 1, 0, -1):
        for start in reversed(range(len(text) - length)):
            if text[start : start + length] == text[-length:]:
                return length, start + length
    return 0, 0


def test_the_automaton_finds_the_longest_suffix_where_it_last_stood():
    rng, lengths = random.Random(1), Counter()
    for n_ids in (1, 2, 3, 9) * 10:
        automaton, text = SuffixAutomaton(), []
        for _ in range(rng.randint(1, 40)):
            text.append(rng.randrange(n_ids))
            automaton.append(text[-1])
            length, _ = automaton.repeated
            assert automaton.repeated == longest_repeated(text), text
            ends = (end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :])
            assert automaton.first == next(ends)
            lengths[length] += 1
        assert automaton.text == text
    assert len(lengths) > 10


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
    runner, other = tiny_runner(2), tiny_runner(2)
    for drafter in (NGram(runner, 2), Oracle(runner, {}, 2)):
        with pytest.raises(ConfigError, match="another runner"):
            generate(other, [[1], [2, 3]], max_new_tokens=2, drafter=drafter)


def plainly_counted(text: list[int], order: int, context: list[int]) -> int | None:
    """Return the token that most often followed the longest known end of the context; among equals the latest."""
    for n in range(min(order, len(context)), 0, -1):
        places = [i for i in range(n, len(text)) if text[i - n : i] == context[-n:]]
        if places:
            counts = Counter(text[i] for i in places)
            return max(counts, key=lambda token: (counts[token], max(i for i in places if text[i] == token)))
    return None


def test_a_table_counts_what_follows_and_survives_its_file(tmp_path: Path):
    rng, order = random.Random(2), 3
    text = [rng.randrange(4) for _ in range(120)]
    table = NGramTable(order)
    table.learn(text[:50])
    table.learn(text, known=50)
    table.save(tmp_path / "table.json", 61)
    loaded = NGramTable.load(tmp_path / "table.json", 61)
    for n in range(1, 60):
        context, wanted = text[n : n + 5], []
        while len(wanted) < 4:
            wanted.append(plainly_counted(text, order, context + wanted))
        assert [*table.continued(context, 4).tokens] == wanted == [*loaded.continued(context, 4).tokens]
    assert [*table.continued([9, 9], 4).tokens] == [] and table.continued([9, text[5]], 4).n_matched == 1


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda x: b"{" + x[7:], lambda x: b"[" * 100_000])
def test_a_damaged_table_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path):
    path = tmp_path / "table.json"
    counted(61).save(path, 61)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"table\.json"):
        NGramTable.load(path, 61)


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
    assert guesses(0, [9, 6, 9]) == [6, 9, 6], "without a match in answers its own text is copied, over and over"


def test_a_request_does_not_know_what_its_random_numbers_drew_before():
    """Nor does one that has tokens when the drafter meets it: they may be in answers that were dropped."""
    drafter = Suffix(tiny_runner(3), gamma=3, keep_answers=1000)
    first = RowUpdate(0, 3, [1, 2], 0, (7, 3))
    assert not drafter.continued(first).tokens
    drafter.continued(first._replace(tokens=[1, 2, 5, 6], n_seen=2))
    again = RowUpdate(1, 3, [1, 2], 0, (7, 3))
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


@pytest.mark.parametrize("kind,seeds", [("combined", (3, 4)), ("another text", (3,)), ("kept answers", (3, 3, 4))])
def test_what_was_kept_leaves_the_joint_law_as_it_is(kind: str, seeds: tuple[int, ...]):
    """Requests run twice in rejection mode: the second time, the drafter has all of their tokens, and a third time with
    other numbers; or it drafts by a text that no request drew."""
    groups = law.irregular_groups(law.N_REQUESTS, 211, (law.PLAIN,))
    cache = FullKVCache(law.TARGET.config, law.N_REQUESTS // 3, law.ROOM, dtype=law.TARGET.dtype)
    runner = ModelRunner(law.TARGET, cache)
    drafter = Suffix(runner, 2, law.PROMPTS[1] * 4) if kind == "another text" else Suffix(runner, 2, keep_answers=999)
    if kind == "combined":
        drafter = Combined(runner, self_draft(runner, Streaming(4, n_sink=1), 2), [drafter], 3)
    prompts, rates = [law.PROMPTS[prompt] for prompt, _ in groups], []
    for seed in seeds:
        sampling = SamplingParams(law.PLAIN.temperature, seed=seed)
        how = {"sampling": sampling, "verification": "rejection", "stop_tokens": [law.STOP]}
        out = generate(runner, prompts, max_new_tokens=law.N_NEW, drafter=drafter, **how)
        p_value, variation, by_chance = law.joint_p_value(groups, out.tokens, law.laws())
        assert p_value > 1e-4 and variation < 1.3 * by_chance
        rates.append(out.stats.counts.acceptance_rate)
    assert rates[-1] > 0.2
    assert kind != "kept answers" or rates[-1] > rates[1] + 0.1, "drafts by answers that other numbers drew"


class Sure(HostDrafter):
    """Knows each request's future; of some positions only."""

    def __init__(self, runner, gamma, futures, knows):
        super().__init__(runner, gamma)
        self.futures, self.knows = futures, knows

    def continued(self, shown: RowUpdate) -> Guess:
        future = self.futures[shown.request_id]
        behind = future[len(shown.tokens) :][: self.gamma]
        return Guess(behind, 9) if self.knows(shown.request_id, len(shown.tokens)) else Guess(behind, 1)


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_the_model_drafts_only_where_a_row_has_no_guess(mode: str):
    """A draft that is the target over a full cache: whatever it follows, nothing is ever rejected."""
    model, prompts, limits = tiny_model(), random_prompts([12, 5, 30]), [25, 14, 20]
    runner = ModelRunner(model, full_cache(model, 3))
    how = {"max_new_tokens": limits, "verification": mode}
    how["sampling"] = SamplingParams(1.1, seed=5) if mode == "coupled" else None
    plain = generate(runner, prompts, **how)
    futures = [prompt + tokens for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    rounds = {}
    for name, knows in {
        "always": lambda request, length: True,
        "never": lambda request, length: False,
        "one row": lambda request, length: request == 1,
        "now and then": lambda request, length: (length - len(prompts[request])) % 9 < 5,
    }.items():
        own = StandaloneDraft(ModelRunner(model, full_cache(model, 3)), 3)
        texts = [Sure(runner, 3, futures, knows), Suffix(runner, 3)]
        drafter = Combined(runner, own, texts, least_match=8)
        paced = Scripted(
            [drafter], [RoundChoice(0, 3), RoundChoice(0, 3), PLAIN_STEP, RoundChoice(0, 2), RoundChoice(0, 3)]
        )
        for controller in ({"drafter": drafter}, {"controller": paced}):
            own.propose, own.follow = (Mock(wraps=method) for method in (own.propose, own.follow))
            out = generate(runner, prompts, **controller, **how)
            assert out.tokens == plain.tokens
            assert out.stats.counts.acceptance_rate == 1.0
            n_caught_up = sum(one.n_seen > 0 for call in own.follow.call_args_list for one in call.args[0])
            rounds[name, next(iter(controller))] = own.propose.call_count, n_caught_up
    for paced in ("drafter", "controller"):
        assert rounds["always", paced][0] == 0 < rounds["now and then", paced][0] < rounds["never", paced][0]
        assert rounds["one row", paced][0] == rounds["never", paced][0] and rounds["now and then", paced][1] > 0


def test_a_rows_guess_stands_where_other_rows_have_none():
    """Next to a model of other weights, whose drafts are rejected."""
    runner, other, prompts = tiny_runner(3), tiny_model(seed=1), random_prompts([12, 5, 30])
    plain = generate(runner, prompts, max_new_tokens=20)
    futures = [prompt + tokens for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    texts = [Sure(runner, 3, futures, lambda request, length: request == 1)]
    drafter = Combined(runner, StandaloneDraft(ModelRunner(other, full_cache(other, 3)), 3), texts, least_match=8)
    out = generate(runner, prompts, drafter=drafter, max_new_tokens=20)
    rates = [row.acceptance_rate for row in out.stats.rows]
    assert out.tokens == plain.tokens and rates[1] == 1.0 > 0.5 > max(rates[0], rates[2])
