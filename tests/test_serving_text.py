"""Text as it grows: where stop strings cut it, characters of several tokens, and what was drafted."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import Alone, Served

from engine.stats import Counts
from models.checkpoints.text_stream import MOST_HELD, TextStream
from models.checkpoints.tokenizer import Tokenizer
from serving.answers import Failure
from serving.jobs import Job
from serving.scheduler import Asked, Update
from serving.stops import Stops
from serving.tgi import _events

TEXTS = st.text("ab.", max_size=14)


def cut(text: str, stops: list[str], keeps: bool) -> tuple[str, bool]:
    """Letter by letter: the text ends with the first stop string that is complete, and of several the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if keeps else end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.booleans(), st.data())
def test_stop_strings_cut_a_text_however_it_comes(text, stops, keeps, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in pairwise([0, *at, len(text)])]
    own, shown, has_ended = Stops(stops, keeps), "", False
    for piece in pieces:
        more, has_ended = own.add(piece)
        shown += more
        if has_ended:
            break
    shown += "" if has_ended else own.rest()
    assert (shown, has_ended) == cut(text, stops, keeps)


def job(tokenizer: Tokenizer, stops: list[str], keeps: bool = False, n_prompt: int = 3) -> Job:
    return Job(Asked([1] * n_prompt, 99, started=1.0), tokenizer, {0: "<s>"}, Stops(stops, keeps), Counts.of_gamma(3))


def update(tokens: list[int], round: int, drafted: int = 0, accepted: int = 0, finish: str | None = None) -> Update:
    return Update(Asked([1], 99), tokens, [], drafted, accepted, round, 2.0, finish)  # type: ignore[arg-type]


def test_characters_are_whole(alone: Alone):
    text = "a€😀é"
    tokens = alone.tokenizer.encode(text, add_bos=False)
    assert len(tokens) == 10
    one = job(alone.tokenizer, [])
    for number, token in enumerate(tokens):
        one.take(update([token], number))
        assert text.startswith(one.text) and "\ufffd" not in one.text
    assert one.text == text
    assert [piece.text for piece in one.pieces] == ["a", "", "", "€", "", "", "", "😀", "", "é"]
    one.take(update(tokens[1:3], 10, finish="length"))
    assert one.text == text + "\ufffd" and one.finish == "length"


class Counting:
    """Notes how many tokens are decoded at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.most, self._tokenizer = 0, tokenizer

    def decode(self, ids: list[int]) -> str:
        self.most = max(self.most, len(ids))
        return self._tokenizer.decode(ids)


def test_what_never_becomes_a_character_is_not_held_for_ever(alone: Alone):
    half, *_ = alone.tokenizer.encode("ä", add_bos=False)
    noise = random.Random(5).choices(range(alone.vocab_size), k=600)
    whole = alone.tokenizer.encode("😀", add_bos=False)
    late = [token for n in range(MOST_HELD - 5, MOST_HELD + 5) for token in [half] * n + whole]
    for tokens in ([half] * 400, [0] * 400, noise, late, alone.tokenizer.encode("\ufffd" * 90)):
        counting = Counting(alone.tokenizer)
        own, tokens = TextStream(counting), [*tokens, *alone.tokenizer.encode("b€", add_bos=False)]  # type: ignore[arg-type]
        assert "".join(map(own.add, tokens)) + own.rest() == alone.tokenizer.decode(tokens)
        assert counting.most <= 2 * MOST_HELD


def test_the_last_event_of_what_failed_is_the_failure(alone: Alone):
    async def told() -> list[dict[str, Any]]:
        one, found = job(alone.tokenizer, []), list[dict[str, Any]]()
        one.take(update([65, 66], 0))
        one.end("timeout", Failure(504, "timeout", "late"))  # nothing has been written yet
        with pytest.raises(Failure):
            async for events in _events(one, ""):
                found += events
        return found

    assert [(event["generated_text"], event["details"]) for event in asyncio.run(told())] == [(None, None)] * 2


def test_what_comes_behind_a_stop_string_is_nobodys(alone: Alone):
    tokens = alone.tokenizer.encode("ab STOP cd", add_bos=False)
    one = job(alone.tokenizer, ["STOP"])
    one.take(update(tokens[:1], 0))
    one.take(update(tokens[1:5], 1, 3, 3))
    assert (one.text, one.finish) == ("ab ", None)
    one.take(update(tokens[5:], 2, 3, 2))
    assert (one.text, one.finish, len(one.pieces)) == ("ab ", "stop_sequence", 7)
    report = one.report()["speculation"]
    assert (report["drafted"], report["accepted"], report["rounds"]) == (6, 5, 2)
    assert [piece.drafted for piece in one.pieces] == [False, True, True, True, False, True, True]


def test_what_might_have_become_a_stop_string_is_shown_in_the_end(alone: Alone):
    tokens = alone.tokenizer.encode("ab ST", add_bos=False)
    one = job(alone.tokenizer, ["STOP"])
    one.take(update(tokens, 1))
    assert one.text == "ab "
    one.take(update([0], 2, finish="stop"))
    assert (one.text, one.finish) == ("ab ST", "eos_token")
    assert one.pieces[-1].special and one.pieces[-1].text == "<s>"


def test_what_comes_while_something_is_written_is_written_next(alone: Alone):
    async def written() -> list[int]:
        one, found = job(alone.tokenizer, []), []
        one.take(update([65], 0))
        async for pieces in one.batches():
            found += [piece.id for piece in pieces]
            if len(found) == 1:  # a slow client: the answer is done before it has taken more
                one.take(update([66, 67], 1, 3, 1))
                one.take(update([68], 2, finish="length"))
        return found

    assert asyncio.run(written()) == [65, 66, 67, 68]


def test_stop_strings_over_the_wire(served: Served, alone: Alone):
    """OpenAI's are left out of the text."""
    texts = ((f"prompt {i}", alone.text(f"prompt {i}", 40)) for i in range(99))
    places = ((prompt, text, place) for prompt, text in texts for place in range(6, len(text) - 6))
    prompt, text, start = next(one for one in places if "\ufffd" not in one[1][one[2] :][:3])
    stop = text[start : start + 3]
    before, stops = text[: text.index(stop)], ["never\x01", stop]
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 40, "stop": stops}}
    events = served.ask("/generate_stream", body).events
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"] == before + stop
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": stops}
    whole = served.ask("/v1/completions", body).json["choices"][0]
    streamed = [event["choices"][0] for event in served.ask("/v1/completions", body | {"stream": True}).events[:-1]]
    assert whole["text"] == "".join(one["text"] for one in streamed) == before
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "stop"
