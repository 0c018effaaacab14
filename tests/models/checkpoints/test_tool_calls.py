"""Calls of tools and reasoning: found in texts however they come, and sent to OpenAI's client."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoints.chat_template import _compiled
from models.checkpoints.reasoning import parted, reasons_after
from models.checkpoints.tool_calls import ToolCallParser
from tests.support.serving_cases import Alone, Served

NAMES = ["get_weather", "search"]
PARIS, FIND = {"city": "Paris", "note": "</tool_call> {né"}, {"query": "cat", "limit": 3}


def hermes(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def llama(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


WEATHER, SEARCH = ("get_weather", PARIS), ("search", FIND)
CASES: list[tuple[str, str, list[tuple[str, object]]]] = [
    (hermes(*WEATHER), "", [WEATHER]),
    (f"\nI look.\n{hermes(*WEATHER)}\n{hermes(*SEARCH)}\n", "\nI look.\n", [WEATHER, SEARCH]),
    (hermes(*WEATHER) + " Done.", "Done.", [WEATHER]),
    (hermes(*WEATHER).removesuffix("\n</tool_call>"), "", [WEATHER]),
    ('<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>', "", [("search", {"query": "a\nb"})]),
    (llama(*WEATHER), "", [WEATHER]),
    (f"\n{llama(*WEATHER)}; {llama(*SEARCH)}", "", [WEATHER, SEARCH]),
    (f"<|python_tag|>{llama(*WEATHER)}", "", [WEATHER]),
    (f"Look: <|python_tag|>{llama(*SEARCH)};{llama(*SEARCH)}", "Look: ", [SEARCH, SEARCH]),
]
TEXTS = [
    hermes("another", {}),
    hermes("search", "cat"),
    hermes(*WEATHER)[:-20],
    llama(*WEATHER)[:-1],
    f"As JSON: {llama(*WEATHER)}",
    '{"answer": [1, 2]}',
    '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>',
    '{"name": "search", "parameters": {"limit": NaN}}',
    '{"name": "search", "parameters": {"limit": 1e999}}',
    '{"name": "search", "parameters": ' + "[" * 5000,
    "<|python_tag|>print(3)",
    "if a <tool_cal",
    "",
]
CASES += [(text, text, []) for text in TEXTS]


def assembled(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call, of which the parts come in their order."""
    calls = list[tuple[str, str]]()
    for part in parts:
        if "id" in part:
            assert (part["index"], part["type"], part["function"]["arguments"]) == (len(calls), "function", "")
            calls.append((part["function"]["name"], ""))
        else:
            assert part["index"] == len(calls) - 1 and [*part["function"]] == ["arguments"]
            calls[-1] = calls[-1][0], calls[-1][1] + part["function"]["arguments"]
    return calls


@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_calls_are_found_however_a_text_comes(text, rest, calls, data):
    at = sorted(data.draw(st.lists(st.integers(0, min(len(text), 200)), max_size=9)))
    parser, sent, parts = ToolCallParser(NAMES), "", list[dict[str, Any]]()
    for start, end in pairwise([0, *at, len(text)]):
        sent += parser.add(text[start:end])
        parts += parser.parts
        assert rest.startswith(sent)
    sent += parser.add("", is_last=True)
    assert sent == rest
    assert [(call["name"], json.loads(call["arguments"])) for call in parser.found] == calls
    if calls:  # else they may be the beginning of a text that is none
        assert assembled(parts + parser.parts) == [(call["name"], call["arguments"]) for call in parser.found]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
STYLES = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(0, 2),
        "separators": st.sampled_from([None, (",", ":"), (" ,", " :  ")]),
    }
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)
BETWEEN = {"arguments": ("<tool_call>\n", "\n</tool_call>\n"), "parameters": ("", ";")}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(ARGUMENTS, STYLES), min_size=1, max_size=3), st.sampled_from([*BETWEEN]), st.data())
def test_parts_join_to_the_arguments_of_the_whole_answer(written, field, data):
    """In every style that JSON allows, whatever is verified in a block; calls beyond the most are left out."""
    before, after = BETWEEN[field]
    calls = [json.dumps({"name": NAMES[i % 2], field: call}, **style) for i, (call, style) in enumerate(written)]
    text = "".join(f"{before}{call}{after}" for call in calls)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    most = data.draw(st.none() | st.integers(1, 2))
    parser, parts = ToolCallParser(NAMES, most), list[dict[str, Any]]()
    for start, end in pairwise([0, *at, len(text)]):
        parser.add(text[start:end])
        parts += parser.parts
    n_before = len(parts)
    parser.add("", is_last=True)
    assert parts[n_before:] == [] == parser.parts, "all came before the end"
    assert assembled(parts) == [(call["name"], call["arguments"]) for call in parser.found]
    assert [json.loads(call["arguments"]) for call in parser.found] == [call for call, _ in written][:most]


@pytest.mark.parametrize("write", [hermes, llama])
def test_arguments_come_as_they_are_written(write):
    """Character by character; half a character that is escaped waits."""
    text = write("search", {"query": "a é \n \U0001f600", "n": [1.5, True]}).replace("\U0001f600", "\\ud83d\\ude00")
    parser, came = ToolCallParser(NAMES), dict[int, str]()
    for i, character in enumerate(text):
        parser.add(character)
        came[i] = "".join(part["function"]["arguments"] for part in parser.parts)
    begin = text.index('{"query')
    assert not any(came[i] for i in range(begin)) and came[begin] == "{"
    assert [came[text.index(x, begin)] for x in "aé"] == ["a", "é"]
    assert came[text.index("ude00") + 4] == "\U0001f600" and came[text.index("1.5") + 3] == "1.5, "
    parser.add("", is_last=True)
    assert parser.parts == [] and "".join(came.values()) == parser.found[0]["arguments"]


def test_a_call_that_is_cut_short_is_sent_as_far_as_it_came():
    """It is no call of the whole answer, and nothing more is sent at the end."""
    for text, sent in [
        (hermes(*WEATHER).partition("Paris")[0], [("get_weather", '{"city": "')]),
        (llama(*SEARCH)[:-2] + ', "x": NaN}}', [("search", "")]),
    ]:
        parser = ToolCallParser(NAMES)
        parser.add(text)
        assert assembled(parser.parts) == sent
        parser.add("", is_last=True)
        assert parser.parts == parser.found == []


def test_text_before_a_mark_is_sent_at_once():
    parser = ToolCallParser(NAMES)
    pieces = {"I ": "I ", "<b>": "<b>", " <tool": " ", "s> <tool_call>{": "<tools> ", "}": ""}
    assert [*map(parser.add, pieces)] == [*pieces.values()]


TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = [("get_weather", {"city": "Paris"}), ("search", {"query": "é"})]
SAYS = f"I look.\n{hermes(*SHORT[0])}\n{hermes(*SHORT[1])}"


@pytest.fixture
def saying(served: Served, alone: Alone, monkeypatch):
    """Function that has the server say a text, whatever the model says, under a template that reads tools."""
    scheduler, intake = served.server.service.scheduler, served.server.service.intake
    template = intake.template
    reads = _compiled(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content or m.tool_calls[0].function.arguments.city }}{% endfor %}"
    )
    monkeypatch.setattr(intake, "template", type(template)(template.path, reads, {}, template.tokenizer))
    publish = scheduler.publish

    def say(text: str) -> None:
        served.until_idle()
        ids = alone.tokenizer.encode(text, add_bos=False)

        def instead(updates):
            changed = []
            for update in updates:
                n = len(ids) if update.finish else 5
                tokens, ids[:] = ids[:n], ids[n:]
                changed.append(update._replace(tokens=tokens, finish=None if ids else "stop"))
            publish(changed)

        monkeypatch.setattr(scheduler, "publish", instead)

    yield say
    served.until_idle()


def test_openais_client_gets_calls_and_answers_them(served: Served, saying):
    client = served.openai
    how = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "stop": ["ELSE"], "max_tokens": 40}
    saying(SAYS)
    (choice,) = client.chat.completions.create(**how).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
    first, second = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in (first, second)] == SHORT
    assert first.id != second.id
    saying(SAYS)
    (choice,) = client.chat.completions.create(parallel_tool_calls=False, **how).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    saying(SAYS)
    with client.chat.completions.stream(**how) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.\n")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed.message.tool_calls] == SHORT
    saying(hermes(*SHORT[0]))
    message = client.chat.completions.create(**how).choices[0].message
    assert message.content is None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    saying("It rains.")
    answer = client.chat.completions.create(**how | {"messages": [*MESSAGES, message, *results]})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "It rains.")
    prompt = served.server.service.intake.tokenizer.encode(
        f"{''.join(map(json.dumps, TOOLS))}[user]hello[assistant]Paris[tool]rain", add_bos=False
    )
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_are_text_where_no_tool_may_be_called(served: Served, saying, body):
    saying(SAYS)
    answer = served.ask(
        "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 40, **body}
    ).json
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": SAYS}
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["prompt_tokens"] == len("[user]hello")


# The text, whether it begins within reasoning, its reasoning and its answer.
CASES: list[tuple[str, bool | None, str, str]] = [
    ("<think>\nwhy </thi\n</think>\n\nyes < no", None, "why </thi\n", "yes < no"),
    ("\n<think>why</think>yes</think>", None, "why", "yes</think>"),
    ("\nwhy</think>\n", True, "why", ""),
    ("why </thin", True, "why </thin", ""),
    ("<thinking> </think>", None, "", "<thinking> </think>"),
    ("  <thi", None, "", "  <thi"),
    ("<think>why</think>yes", False, "", "<think>why</think>yes"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
def test_the_pieces_of_a_text_do_not_matter(text, is_open, reasoning, answer):
    """What was told apart before stays as the text grows."""
    before = "", ""
    for n in range(len(text)):
        why, said = parted(text[:n], is_open)
        assert why.startswith(before[0]) and (said or "").startswith(before[1])
        before = why, said or ""
    why, said = parted(text, is_open, is_last=True)
    assert (why, said or "") == (reasoning, answer) and why.startswith(before[0]) and answer.startswith(before[1])


def test_a_prompt_opens_reasoning_or_closes_it_or_leaves_it_free():
    assert reasons_after("[a]<think>\n") is True and reasons_after("[a]<think>\n\n</think>\n\n") is False
    assert reasons_after("what is <think>?\n[a]") is None
