"""foretoken.py chat: answers behind all that was said, piped and interrupted."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.decoding import Decoder
from engine.requests import Request
from terminal.panes import printable
from tests.support.programs import Ended, run
from tests.support.serving_cases import Alone

FLAGS = "--dtype float64 --device cpu --draft_budget 16 --gen_len 24"
Chat = Callable[..., Ended]


@pytest.fixture
def chat(chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Pipes those lines into the program."""

    def piped(*lines: str, flags: str = FLAGS) -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return run("foretoken.py chat", [str(chat_checkpoint), *flags.split()])

    return piped


def prompt_of(alone: Alone, *messages: tuple[str, str]) -> list[int]:
    text = "".join(f"[{role}]{content}\n" for role, content in messages) + "[a]"
    return alone.tokenizer.encode(text, add_bos=False)


def continued(alone: Alone, *messages: tuple[str, str]) -> str:
    """Return the text that plain decoding puts after a conversation."""
    return alone.text(prompt_of(alone, *messages), 24)


def test_every_line_is_answered_behind_all_that_was_said(chat: Chat, alone: Alone, monkeypatch) -> None:
    """Only what is new is prefilled."""
    requests, submit = list[Request](), Decoder.submit
    monkeypatch.setattr(Decoder, "submit", lambda own, request: requests.append(request) or submit(own, request))
    lines, system = ("Hello", "", "And then?", "/reset", "Hello", "/exit", "never"), ("system", "Brief.")
    ended = chat(*lines, flags=f"{FLAGS} --system Brief.")
    first = continued(alone, system, ("user", "Hello"))
    second = continued(alone, system, ("user", "Hello"), ("assistant", first), ("user", "And then?"))
    assert ended.code == 0, ended.err
    assert ended.out == "".join(printable(f"{answer}\n") for answer in (first, second, first))
    said = [line for line in ended.err.splitlines() if "ms per token" in line]
    assert len(said) == 3 and all("acceptance rate 0." in line and "tokens per round" in line for line in said)
    assert first != second
    hello, then, anew = ((request.n_reused, len(request.prompt)) for request in requests[:3])
    # The template writes an answer behind [assistant], not behind [a].
    assert hello[0] == 0 < hello[1] - 1 <= then[0] < then[1] and anew[0] == anew[1] - 1


def test_an_end_token_is_no_part_of_an_answer(chat: Chat, alone: Alone) -> None:
    """Here it is a token of text, at which the first answer is cut, and the second only if it comes there."""
    tokenizer, expected = alone.tokenizer, ""
    answers = [alone.tokens(prompt_of(alone, ("user", line)), 24) for line in ("Hello", "And then?")]
    end = answers[0][10]
    for tokens in answers:
        cut = tokens[: tokens.index(end)] if end in tokens else tokens
        assert tokenizer.decode([*cut, end]) != tokenizer.decode(cut)
        expected += printable(f"{tokenizer.decode(cut)}\n")
    assert chat("Hello", "/reset", "And then?", flags=f"{FLAGS} --config_overrides eos_token_id={end}").out == expected


def test_an_interrupted_answer_ends_alone(chat: Chat, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of the answer is printed, and the next question is answered whole."""
    step, steps = Decoder.step, iter(range(1000))

    def interrupted(decoder: Decoder) -> object:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step(decoder)

    monkeypatch.setattr(Decoder, "step", interrupted)
    ended = chat("Hello", "/reset", "Hello")
    whole = printable(continued(alone, ("user", "Hello")))
    cut = ended.out.removesuffix(f"\n{whole}\n").rstrip("\ufffd")  # of a character that is cut, too
    assert ended.code == 0 and "cancelled" in ended.err
    assert whole.startswith(cut) and 0 < len(cut) < len(whole)


@pytest.mark.parametrize("flags", ["oracle", "--gamma auto", "--draft_budget auto", "--context 20"])
def test_what_gives_no_answer_is_refused(chat: Chat, flags: str) -> None:
    field = "--draft" if flags == "oracle" else flags.split()[0]
    assert f"where:    {field}\n" in chat("Hello", flags=f"{flags} --device cpu").refusal


def test_a_full_conversation_is_refused_with_a_note(chat: Chat, alone: Alone) -> None:
    """An unknown command is no part of a conversation."""
    ended = chat("Hello", "x" * 60, "/reste", "/reset", "Hello", flags=f"{FLAGS} --context 80")
    whole = printable(continued(alone, ("user", "Hello")))
    assert ended.code == 0 and ended.err.count("no room") == 1 and "no command /reste" in ended.err
    assert ended.out == f"{whole}\n{whole}\n" and ended.err.count("cut at 24 tokens by --gen_len") == 2
