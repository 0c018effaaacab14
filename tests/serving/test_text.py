"""Text as it grows: where stop strings cut it, characters of several tokens, and which tokens were drafted."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stats import Counts
from models.checkpoints.text_stream import MOST_PENDING, TextStream
from models.checkpoints.tokenizer import Tokenizer
from serving import answers
from serving.answers import Answer, batches, report
from serving.scheduler import ServedRequest, Update
from tests.support.serving_cases import Alone

TEXTS = st.text("ab.", max_size=14)


def cut(text: str, stops: list[str], keeps: bool) -> tuple[str, bool]:
    """Cut a text letter by letter at the first stop string that is complete, and of several the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if keeps else end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.booleans(), st.data())
def test_stop_strings_cut_a_text_however_it_comes(text, stops, keeps, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in pairwise([0, *at, len(text)])]
    written, sent, has_ended = "", "", False
    for piece in pieces:
        written += piece
        shown, has_ended = answers.cut(written, stops, keeps)
        assert shown.startswith(sent)
        sent = shown
        if has_ended:
            break
    if not has_ended:
        sent, has_ended = answers.cut(text, stops, keeps, is_last=True)
    assert (sent, has_ended) == cut(text, stops, keeps)


def answer_of(tokenizer: Tokenizer, stops: list[str], keeps: bool = False) -> Answer:
    request = ServedRequest([1] * 3, 99)
    request.started = 1.0
    return Answer(request, tokenizer, {0: "<s>"}, stops, keeps, Counts.of_gamma(3))


def test_an_end_token_is_no_text(alone: Alone):
    """Here it is a token of text, and it is named where its log-probability stands."""
    end, text = alone.tokenizer.encode("z", add_bos=False)[0], alone.tokenizer.encode("ab€", add_bos=False)
    for tokens, whole in ((text, "ab€"), (text[:-1], "ab\ufffd")):
        answer = answer_of(alone.tokenizer, [alone.tokenizer.decode([end])])
        answer.request.stop_tokens = [end]
        answer.take(update(tokens[:1], 0))
        answer.take(update([*tokens[1:], end], 1, 3, 3, "stop"))
        assert (answer.text, answer.finish, len(answer.tokens)) == (whole, "eos_token", len(tokens) + 1)
        assert (answer.tokens[-1].text, answer.tokens[-1].special) == (alone.tokenizer.decode([end]), True)
    answer = answer_of(alone.tokenizer, [])  # a token like any other where it does not end the answer
    answer.take(update([*text, end], 0, finish="length"))
    assert answer.text == f"ab€{alone.tokenizer.decode([end])}"


def update(tokens: list[int], round: int, drafted: int = 0, accepted: int = 0, finish: str | None = None) -> Update:
    return Update(ServedRequest([1], 99), tokens, [], drafted, accepted, round, 2.0, finish)  # type: ignore[arg-type]


def test_characters_are_whole(alone: Alone):
    text = "a€😀é"
    tokens = alone.tokenizer.encode(text, add_bos=False)
    assert len(tokens) == 10
    answer = answer_of(alone.tokenizer, [])
    for number, token in enumerate(tokens):
        answer.take(update([token], number))
        assert text.startswith(answer.text) and "\ufffd" not in answer.text
    assert answer.text == text
    assert [token.text for token in answer.tokens] == ["a", "", "", "€", "", "", "", "😀", "", "é"]
    answer.take(update(tokens[1:3], 10, finish="length"))
    assert answer.text == text + "\ufffd" and answer.finish == "length"


def test_an_answer_continues_the_text_of_its_prompt() -> None:
    """Some tokenizers drop the space before the first word of a text."""
    words = ["▁Paris", "▁is", "▁here", "\ufffd"]  # the last is half a character

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[id_] for id_ in ids).replace("\ufffd" * 2, "€").replace("▁", " ").lstrip()

    metaspace: Any = SimpleNamespace(decode=decode)
    for prompt, text in (((1,), " Paris here"), ((), "Paris here"), ((3, 3), " Paris here"), ((3,), "Paris here")):
        answer = answer_of(metaspace, [])
        answer.continue_text(prompt)
        answer.take(update([0, 2], 0))
        assert answer.text == text


def test_what_never_becomes_a_character_is_not_held_for_ever(alone: Alone):
    half, *_ = alone.tokenizer.encode("ä", add_bos=False)
    noise = random.Random(5).choices(range(alone.vocab_size), k=600)
    whole = alone.tokenizer.encode("😀", add_bos=False)
    late = [token for n in range(MOST_PENDING - 5, MOST_PENDING + 5) for token in [half] * n + whole]
    sizes, decode = list[int](), alone.tokenizer.decode
    counting = SimpleNamespace(decode=lambda ids: sizes.append(len(ids)) or decode(ids))
    for tokens in ([half] * 400, [0] * 400, noise, late, alone.tokenizer.encode("\ufffd" * 90)):
        stream, tokens = TextStream(counting), [*tokens, *alone.tokenizer.encode("b€", add_bos=False)]  # type: ignore[arg-type]
        assert "".join(map(stream.add, tokens)) + stream.rest() == decode(tokens)
    assert max(sizes) <= 2 * MOST_PENDING


def test_tokens_behind_a_stop_string_are_not_counted(alone: Alone):
    tokens = alone.tokenizer.encode("ab STOP cd", add_bos=False)
    answer = answer_of(alone.tokenizer, ["STOP"])
    answer.take(update(tokens[:1], 0))
    answer.take(update(tokens[1:5], 1, 3, 3))
    assert (answer.text, answer.finish) == ("ab ", None)
    answer.take(update(tokens[5:], 2, 3, 2))
    assert (answer.text, answer.finish, len(answer.tokens)) == ("ab ", "stop_sequence", 7)
    said = report([answer])["speculation"]
    assert (said["drafted"], said["accepted"], said["rounds"]) == (6, 5, 2)
    assert [token.drafted for token in answer.tokens] == [False, True, True, True, False, True, True]


# With "b€", the last token completes the character; with "b\ufffd" and "\ufffd", no token does.
CASES = [("ab€", 0, "b€", True), ("ab€", 1, "b\ufffd", True), ("abé", 1, "\ufffd", True)]
CASES += [("abé", 1, "é", False), ("abé", 1, "\ufffdc", False)]


@pytest.mark.parametrize(("text", "n_missing", "stop", "ends"), CASES)
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_may_end_with_the_last_character(alone: Alone, text, n_missing, stop, ends, keeps, finish):
    tokens = alone.tokenizer.encode(text, add_bos=False)
    tokens = tokens[: len(tokens) - n_missing]
    answer, whole = answer_of(alone.tokenizer, [stop], keeps), alone.tokenizer.decode(tokens)
    answer.take(update(tokens[:1], 0))
    answer.take(update([*tokens[1:], *([0] if finish == "stop" else [])], 1, 3, 3, finish))
    assert answer.text == (whole if keeps or not ends else whole.removesuffix(stop))
    assert answer.finish == ("stop_sequence" if ends else "eos_token" if finish == "stop" else "length")
    n_tokens = len(tokens) + (finish == "stop" and n_missing > 0)
    assert report([answer])["timings"]["predicted_n"] == len(answer.tokens) == n_tokens


def test_what_comes_while_something_is_written_is_written_next(alone: Alone):
    async def written() -> list[int]:
        answer, found = answer_of(alone.tokenizer, []), []
        answer.take(update([65], 0))
        async for _, tokens in batches([answer]):
            found += [token.id for token in tokens]
            if len(found) == 1:  # a slow client: the answer is done before it has taken more
                answer.take(update([66, 67], 1, 3, 1))
                answer.take(update([68], 2, finish="length"))
        return found

    assert asyncio.run(written()) == [65, 66, 67, 68]
