"""Text as it grows: where stop strings cut it, characters of several tokens, and what was drafted."""

import asyncio
import random
from collections.abc import Callable
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


@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("text", "n_missing", "stop", "ends"),
    [
        ("ab€", 0, "b€", True),  # the last token completes the character
        ("ab€", 1, "b\ufffd", True),  # no token does
        ("abé", 1, "\ufffd", True),
        ("abé", 1, "é", False),
        ("abé", 1, "\ufffdc", False),
    ],
)
def test_a_stop_string_may_end_with_the_last_character(alone: Alone, text, n_missing, stop, ends, keeps, finish):
    tokens = alone.tokenizer.encode(text, add_bos=False)
    tokens = tokens[: len(tokens) - n_missing]
    one, whole = job(alone.tokenizer, [stop], keeps), alone.tokenizer.decode(tokens)
    one.take(update(tokens[:1], 0))
    one.take(update([*tokens[1:], *([0] if finish == "stop" else [])], 1, 3, 3, finish))
    assert one.text == (whole if keeps or not ends else whole.removesuffix(stop))
    assert one.finish == ("stop_sequence" if ends else "eos_token" if finish == "stop" else "length")
    assert (
        one.report()["timings"]["predicted_n"] == len(one.pieces) == len(tokens) + (finish == "stop" and n_missing > 0)
    )


def test_logits_that_are_not_finite_are_told_without_the_servers_numbers(alone: Alone):
    request = Asked([1], 99, index=17)
    request.fail(5)
    one = job(alone.tokenizer, [])
    one.take(Update(request, [], [], 0, 0, 1, 2.0, "error"))
    assert one.failure is not None and one.failure.status == 424
    assert "position 5" in one.failure.message and "17" not in one.failure.message


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


def cut_in_a_character(alone: Alone, prompt_of: Callable[[str], list[int]]) -> tuple[str, int, str]:
    """What to ask, for how many tokens, and the answer: its last character is not complete."""
    for inputs in (f"prompt {i}" for i in range(99)):
        stream, text = TextStream(alone.tokenizer), ""
        for n, token in enumerate(alone.tokens(prompt_of(inputs), 40), start=1):
            text += stream.add(token)
            whole = text + stream.rest()
            if n > 5 and whole != text and whole.find(whole[-2:]) == len(whole) - 2 > 0:
                return inputs, n, whole
    raise AssertionError("no answer ends within a character")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_stop_string_that_a_cut_character_completes_over_the_wire(served: Served, alone: Alone, path):
    """The length limit cuts a character, which is shown as U+FFFD and completes a stop string: that is the reason."""
    encode = alone.tokenizer.encode
    of_chat = path.endswith("chat/completions")
    inputs, n, whole = cut_in_a_character(
        alone, lambda text: encode(f"[user]{text}\n[a]", add_bos=False) if of_chat else encode(text)
    )
    stop, before = whole[-2:], whole[:-2]
    if path == "/generate":
        body = {"inputs": inputs, "parameters": {"max_new_tokens": n, "stop": [stop], "details": True}}
        answer, *events = served.ask(path, body).json, *served.ask("/generate_stream", body).events
        for details in (answer["details"], events[-1]["details"]):
            assert (details["finish_reason"], details["generated_tokens"]) == ("stop_sequence", n)
        assert answer["generated_text"] == events[-1]["generated_text"] == whole
        for tokens in (answer["details"]["tokens"], [event["token"] for event in events]):
            assert "".join(token["text"] for token in tokens) == whole
            assert len(tokens) == n and all(token["logprob"] < 0 for token in tokens)
        return
    asked = {"messages": [{"role": "user", "content": inputs}], "logprobs": True} if of_chat else {"prompt": inputs}
    body = {"logprobs": 0, "max_tokens": n, "temperature": 0, "stop": stop} | asked
    answer = served.ask(path, body).json
    *events, usage = served.ask(path, body | {"stream": True, "stream_options": {"include_usage": True}}).events[:-1]
    choices = [event["choices"][0] for event in events]
    shown = [one["delta"].get("content", "") if of_chat else one["text"] for one in choices]
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if of_chat else choice["text"]) == "".join(shown) == before
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"] == n
    for logprobs in ([choice["logprobs"]], [one["logprobs"] for one in choices]):
        each = [value for one in logprobs for value in one["content" if of_chat else "token_logprobs"]]
        assert len(each) == n


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
